"""Add to the passes that workers run what these send each other."""

from collections import defaultdict
from collections.abc import Sequence

from ipu_dynamo.program import Call
from ipu_dynamo.program.schedule.actions import (
    Action,
    ReceiveValues,
    RunPass,
    SendValues,
    Transfer,
)
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.stage_passes import StagePass

_ROOM = 2  # micro-batches that wait for a reader


def with_transfers(
    calls: Sequence[Call],
    runs: Sequence[Sequence[RunPass]],
    waits: Sequence[Sequence[int]],
    readers: Sequence[Sequence[int]] = (),
) -> Schedule:
    """The schedule of these passes: a worker sends right after a pass, and receives right before.

    Args:
        calls: of one micro-batch, in program order, with all that they read and make.
        runs: for each worker, what it runs. All passes of an IPU and replica have one worker.
        waits: for each call, the earlier ones that must be done before it.
        readers: for each call, the later ones that must have done the micro-batch two before, so
            that they do not fall behind; empty where none have to.
    """
    worker_of = {
        (run.index, run.replica): worker for worker, of in enumerate(runs) for run in of
    }
    values = _values(calls, waits)
    sources: list[list[tuple[int, int]]] = [[] for _ in calls]  # each with how long ago it ran
    for source, target in values:
        sources[target].append((source, 0))
    for target, later in enumerate(readers):
        sources[target] += [(source, _ROOM) for source in later]
    needed: list[tuple[RunPass, int, int]] = []  # what a run waits for: a pass, a micro-batch
    for worker, of in enumerate(runs):
        for run in of:
            for source, ago in sources[run.index]:
                away = worker_of[source, run.replica] != worker
                if away and run.micro_batch >= ago:
                    needed.append((run, source, run.micro_batch - ago))
    pairs = sorted({(source, run.index) for run, source, _ in needed})
    numbers = {pair: number for number, pair in enumerate(pairs)}
    received: dict[RunPass, list[Action]] = defaultdict(list)
    sent: dict[tuple[int, int, int], list[SendValues]] = defaultdict(list)
    for run, source, micro_batch in needed:
        number, place = numbers[source, run.index], (micro_batch, run.replica)
        received[run].append(ReceiveValues(number, *place))
        sent[source, *place].append(SendValues(number, *place))
    workers = []
    for of in runs:
        actions: list[Action] = []
        for run in of:
            sends = sent[run.index, run.micro_batch, run.replica]
            actions += [*received[run], run, *sorted(sends, key=lambda send: send.transfer)]
        workers.append(tuple(actions))
    transfers = (Transfer(*pair, values.get(pair, ())) for pair in pairs)
    return Schedule(tuple(map(StagePass.of, calls)), tuple(workers), tuple(transfers))


def _values(
    calls: Sequence[Call], waits: Sequence[Sequence[int]]
) -> dict[tuple[int, int], tuple[str, ...]]:
    """What each call leaves for those that wait for it, but for waits that follow from others.

    A value is handed over once to an IPU whose calls read it: to the first that waits for it.
    """
    wanted: dict[int, set[str]] = defaultdict(set)
    for call in calls:
        wanted[call.ipu] |= {*call.arguments}
    carried: dict[tuple[int, int], tuple[str, ...]] = {}
    looked: dict[tuple[int, int], int] = defaultdict(int)  # by the IPUs, up to which call
    before: list[set[int]] = []  # of each call, those that are surely done
    last: dict[int, int] = {}  # call of each IPU
    for target, call in enumerate(calls):
        own = {last[call.ipu]} if call.ipu in last else set()
        others = {source for source in waits[target] if calls[source].ipu != call.ipu}
        direct = own | others
        implied = set().union(*(before[source] for source in direct))
        before.append(direct | implied)
        for source in sorted(others):
            ipus = calls[source].ipu, call.ipu
            made = (
                name
                for other in calls[looked[ipus] : source + 1]
                if other.ipu == ipus[0]
                for name in other.results
            )
            values = tuple(name for name in made if name in wanted[call.ipu])
            looked[ipus] = max(looked[ipus], source + 1)
            if values or source not in implied:
                carried[source, target] = values
        if call.direction != "weights":
            last[call.ipu] = target
    return carried
