"""Check that workers run side by side, and what they hold in memory."""

import sys
import threading
import time

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ipu_dynamo import BeginBlock, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.runtime.execute.timeline import Timeline
from ipu_dynamo.tune.intra_op import intra_op_threads
from tests.program.schedule.test_schedule import STASH

PIPELINE = Strategy(kind="pipelined")


class Chain(nn.Module):
    """Linear layers, one stage each."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(stages)])
        for ipu, layer in enumerate(self.layers):
            BeginBlock(layer, f"stage {ipu}", ipu_id=ipu)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.mse_loss(h, torch.zeros_like(h))


def step_of(model: nn.Module, accumulation: int, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"engine": "eager", "strategy": PIPELINE, "output_mode": "all", "workers": 9} | options
    return compile_training(model, optimizer, Options(gradient_accumulation=accumulation, **chosen))


def chain(stages: int) -> Chain:
    torch.manual_seed(0)
    return Chain(stages)


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_gives_the_bits_of_one_worker(workers):
    data = torch.randn(2 * 7 * 2 * 4, 8)
    results = []
    for count in (1, workers):
        model = chain(3)
        step = step_of(model, 7, device_iterations=2, replicas=2, workers=count)
        losses = [step(data) for _ in range(3)]
        results.append([*losses, *model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


alive: dict[int, list[StorageWeakRef]] = {}  # by stage, what the operator below has returned
peaks: dict[int, int] = {}


@torch.library.custom_op("ipu_test::keep", mutates_args=())
def keep(x: Tensor, stage: int) -> Tensor:
    result = x.clone()
    made = alive.setdefault(stage, [])
    made[:] = [one for one in made if not one.expired()]
    made.append(StorageWeakRef(result.untyped_storage()))
    peaks[stage] = max(peaks.get(stage, 0), len(made))
    return result


keep.register_fake(lambda x, stage: torch.empty_like(x))
keep.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[0].isfinite(), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Keeping(Chain):
    def forward(self, x: Tensor) -> Tensor:
        h = x
        for stage, layer in enumerate(self.layers):
            h = keep(layer(h), stage)
        return F.mse_loss(h, torch.zeros_like(h))


@pytest.mark.parametrize("workers", [2, 9])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_memory_holds_the_stash_that_the_program_states(stages, workers):
    alive.clear()
    peaks.clear()
    step = step_of(Keeping(stages), 4 * stages, workers=workers, device_iterations=2)
    data = torch.randn(8 * stages * 2, 8)
    step.compile(data)
    step.executable.timeline = timeline = Timeline()
    step(data)
    assert [one.copies for one in step.program.stash] == STASH[stages]
    held = [peaks[stage] for stage in range(stages)]  # in memory; less where a later one is quicker
    assert all(0 < n <= m for n, m in zip(held, STASH[stages], strict=True))
    assert all(n <= m for n, m in zip(timeline.stash().values(), STASH[stages], strict=True))
    assert not [one for made in alive.values() for one in made if not one.expired()]


def test_an_inference_does_not_run_ahead_of_a_slow_stage():
    @torch.library.custom_op("ipu_test::sleep", mutates_args=())
    def sleep(x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x.clone()

    sleep.register_fake(torch.empty_like)

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), BeginBlock(nn.Linear(8, 8), ipu_id=1)

        def forward(self, x: Tensor) -> Tensor:
            return sleep(self.b(keep(self.a(x), 0)))

    alive.clear()
    peaks.clear()
    model = Uneven()
    options = Options(engine="eager", device_iterations=20, strategy=PIPELINE, workers=2)
    data = torch.randn(40, 8)
    torch.testing.assert_close(compile_inference(model, options)(data), model.b(model.a(data)))
    assert peaks[0] == 2  # one is read while the next is made


def test_stages_that_wait_for_each_other_finish():
    """Stage 0 of micro-batch m + 1 and stage 1 of micro-batch m go on only together."""
    last = 3
    here = [[threading.Event() for _ in range(last + 1)] for _ in range(2)]

    @torch.library.custom_op("ipu_test::meet", mutates_args=())
    def meet(h: Tensor, x: Tensor, stage: int) -> Tensor:
        micro_batch = int(x[0, 0])
        here[stage][micro_batch].set()
        other = micro_batch - 1 if stage == 0 else micro_batch + 1
        if 0 <= other <= last and not here[1 - stage][other].wait(timeout=60):
            raise TimeoutError(f"stage {stage} is alone at micro-batch {micro_batch}")
        return h.clone()

    meet.register_fake(lambda h, x, stage: torch.empty_like(h))
    meet.register_autograd(lambda ctx, gradient: (gradient, None, None))

    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            BeginBlock(self.b, ipu_id=1)

        def forward(self, x: Tensor) -> Tensor:
            h = meet(self.a(x), x, 0)
            return F.mse_loss(meet(self.b(h), x, 1), x)

    data = torch.arange(last + 1.0).repeat_interleave(2)[:, None].repeat(1, 4)
    assert step_of(Meeting(), last + 1)(data).isfinite().all()


def test_two_programs_run_in_two_threads():
    data = torch.randn(7 * 2, 8)
    expected = [step_of(chain(3), 7)(data) for _ in range(2)]
    steps = [step_of(chain(3), 7) for _ in range(2)]
    for step in steps:
        step.compile(data)
    found: dict[int, Tensor] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: steps[i](data)})) for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in range(2))


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_data_loader_may_fork_when_workers_have_run(meanwhile):
    data = torch.randn(6 * 7 * 2, 8)
    step, other, expected = (step_of(chain(3), 7) for _ in range(3))
    losses = [expected(batch) for batch in data.split(14)]
    step.compile(data[:14])
    other(data[:14])
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.001):
            other(data[:14])

    thread = threading.Thread(target=run)
    if meanwhile:
        thread.start()
    try:
        settings = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60}
        loader = DataLoader(TensorDataset(data), batch_size=14, **settings)
        found = [step(batch) for (batch,) in loader]
    finally:
        stop.set()
        if meanwhile:
            thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True))


def test_stages_read_inputs_where_they_lie():
    seen: dict[int, list[int]] = {0: [], 1: []}

    @torch.library.custom_op("ipu_test::look", mutates_args=())
    def look(x: Tensor, stage: int) -> Tensor:
        seen[stage].append(x.data_ptr())
        return x.clone()

    look.register_fake(lambda x, stage: torch.empty_like(x))

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), BeginBlock(nn.Linear(8, 8), ipu_id=1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.a(look(x, 0))
            return F.mse_loss(self.b(h) + look(x, 1), look(y, 1))

    step = step_of(Looking(), 3, device_iterations=2, recompute="off")
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    step(x, y)
    assert seen[0] == [x[2 * i :].data_ptr() for i in range(6)]
    assert sorted(seen[1]) == sorted(t[2 * i :].data_ptr() for i in range(6) for t in (x, y))


@pytest.mark.cuda
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_launch_on_the_streams_of_the_caller(workers):
    """What a worker reads was made on the caller's stream, where it comes late."""
    model, other = chain(3).cuda(), chain(3).cuda()
    data = torch.randn(20 * 2, 8, device="cuda")
    expected = step_of(other, 20, workers=1)(data)
    step = step_of(model, 20, workers=workers)
    step.compile(data)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.zeros_like(data)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles
        late.copy_(data)
        losses = step(late)
        stream.synchronize()
    assert torch.equal(losses, expected)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("workers", [1, 2])
def test_no_other_thread_gets_the_number_of_a_worker(workers):
    """A thread whose first operator runs during a step has the number of the process."""
    found = []

    @torch.library.custom_op("ipu_test::other_thread", mutates_args=())
    def other_thread(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return x.clone()

    class Asking(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(other_thread(x))

    other_thread.register_fake(torch.empty_like)
    with intra_op_threads(4):
        step = step_of(Asking(2), 3, workers=workers)
        step(torch.randn(6, 8))
        assert step.executable._looped._loop._threads == 2
    alone: list[int] = []
    thread = threading.Thread(target=lambda: alone.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert set(found) == set(alone)


def test_a_worker_that_waits_for_nothing_makes_no_calls_to_wait():
    """Workers that share micro-batches neither send nor receive."""
    made: set[str] = set()

    def profile(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.endswith(("tasks/workers.py", "runtime/changes.py")):
            made.add(frame.f_code.co_name)

    options = Options(engine="eager", device_iterations=8, workers=2)
    run, data = compile_inference(nn.Linear(8, 8), options), torch.randn(8, 8)
    run(data)
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run(data)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert "_run_worker" in made
    assert not made & {"wait", "wait_for", "_until", "finish", "make"}
