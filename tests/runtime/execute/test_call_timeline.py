"""Check the bytes on each IPU that a recorded call notes after its tasks."""

from threading import Thread
from time import sleep
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.profiling.recording import RecordedBytes, Recording, this_thread
from ipu_dynamo.program.schedule.planning import pipelined
from ipu_dynamo.runtime.execute.call_timeline import CallTimeline
from tests.program.schedule.test_schedule import training_calls

PROGRAM = SimpleNamespace(kind="training", inputs=(), outputs=(), variables=())


class Kept(Recording):
    """What was added, in order."""

    def __init__(self):
        super().__init__()
        self.added = []

    def add(self, one):
        self.added.append(one)


def values_of(timeline):
    """Replica, IPU and bytes of each counter."""
    kept = Kept()
    timeline.add_to(kept, this_thread())
    counters = [one for one in kept.added if isinstance(one, RecordedBytes)]
    return [(one.replica, one.ipu, one.nbytes["values"]) for one in counters]


@given(
    stages=st.integers(1, 4),
    micro_batches=st.integers(1, 9),
    replicas=st.integers(1, 2),
    workers=st.integers(1, 4),
    random=st.randoms(use_true_random=False),
)
def test_values_are_the_sum_over_micro_batches(stages, micro_batches, replicas, workers, random):
    calls = training_calls(stages)
    schedule = pipelined(calls, micro_batches=micro_batches, replicas=replicas, workers=workers)
    timeline = CallTimeline(PROGRAM, replicas=range(replicas))
    for _ in range(2):  # a call forgets the one before
        timeline.call_began(micro_batches)
        held, expected = {}, []
        for run in sorted((run for of in schedule.runs for run in of), key=lambda run: run.cycle):
            ipus = random.sample(range(stages), random.randint(0, stages))
            nbytes = {ipu: random.randint(0, 9) for ipu in ipus}
            before = held.get((run.replica, run.micro_batch), {})
            held[run.replica, run.micro_batch] = nbytes
            timeline.values_held(run.replica, run.micro_batch, nbytes)
            for ipu in sorted({*before, *nbytes}):
                of_replica = [of for (replica, _), of in held.items() if replica == run.replica]
                total = sum(of.get(ipu, 0) for of in of_replica)
                expected.append((run.replica, ipu, total))
        assert values_of(timeline) == expected


class Slow(dict):
    """Bytes that let other threads run while one reads them."""

    def get(self, *arguments):
        sleep(0.001)
        return super().get(*arguments)


def test_workers_that_report_at_the_same_time_lose_nothing():
    timeline = CallTimeline(PROGRAM)
    timeline.call_began(4)

    def work(micro_batch):
        for nbytes in range(31):
            timeline.values_held(0, micro_batch, Slow({0: nbytes * 10**micro_batch}))

    workers = [Thread(target=work, args=(micro_batch,)) for micro_batch in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert values_of(timeline)[-1] == (0, 0, 30 * 1111)
