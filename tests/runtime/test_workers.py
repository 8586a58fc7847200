"""Check that workers run side by side, stop together, and leave nothing behind."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ipu_dynamo import BeginBlock, Options, Strategy, compile_training
from ipu_dynamo.errors import ExecutionError
from ipu_dynamo.runtime.timeline import Timeline
from tests.runtime.test_schedule import STASH

PIPELINE = Strategy(kind="pipelined")
fails_at: list[int] = []  # the marks of rows on which the operator below raises


@torch.library.custom_op("ipu_test::trip", mutates_args=())
def trip(x: Tensor) -> Tensor:
    if fails_at and bool((x[:, 0] == fails_at[0]).any()):
        raise ValueError("tripped")
    return x.clone()


trip.register_fake(torch.empty_like)
trip.register_autograd(lambda ctx, gradient: gradient)


class Chain(nn.Module):
    """Linear layers, one stage each; `where` is the stage that trips on marked rows."""

    def __init__(self, stages: int, where: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(stages)])
        self.where = where
        for ipu, layer in enumerate(self.layers):
            BeginBlock(layer, f"stage {ipu}", ipu_id=ipu)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for index, layer in enumerate(self.layers):
            h = torch.tanh(layer(h))
            if index == self.where:
                h = h * trip(x)
        return F.mse_loss(h, torch.zeros_like(h))


def step_of(model: nn.Module, accumulation: int, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"engine": "eager", "strategy": PIPELINE, "output_mode": "all", "workers": 9} | options
    return compile_training(model, optimizer, Options(gradient_accumulation=accumulation, **chosen))


def chain(stages: int, where: int | None = None) -> Chain:
    torch.manual_seed(0)
    return Chain(stages, where)


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
    assert peaks == dict(enumerate(STASH[stages]))  # in memory
    assert all(n <= m for n, m in zip(timeline.stash().values(), STASH[stages], strict=True))
    assert not [one for made in alive.values() for one in made if not one.expired()]


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


def test_a_failure_names_its_place_and_leaves_nothing_behind():
    model, fresh = chain(3, where=2), chain(3, where=2)
    step = step_of(model, 5)
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(5 * 2, 8, generator=generator)
    for _ in range(30):
        micro_batch = int(torch.randint(0, 5, (), generator=generator))
        marked = data.clone()
        marked[micro_batch * 2, 0] = 77
        fails_at[:] = [77]
        before = set(threading.enumerate())
        weights = [p.clone() for p in model.parameters()]
        try:
            with pytest.raises(ExecutionError, match="tripped") as caught:
                step(marked)
        finally:
            fails_at.clear()
        error = caught.value
        assert (error.stage, error.micro_batch) == (2, micro_batch)
        assert "call @" in error.instruction
        assert "h = h * trip(x)" in error.where
        assert set(threading.enumerate()) == before
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    expected = step_of(fresh, 5)(data)
    assert torch.equal(step(data), expected)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True)
    )


def test_ctrl_c_stops_all_workers():
    @torch.library.custom_op("ipu_test::slow", mutates_args=())
    def slow(x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x.clone()

    slow.register_fake(torch.empty_like)
    slow.register_autograd(lambda ctx, gradient: gradient)

    class Slow(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(slow(x))

    torch.manual_seed(0)
    model = Slow(2)
    step = step_of(model, 100)
    data = torch.randn(200, 8)
    step.compile(data)
    before = set(threading.enumerate())
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        step(data)
    timer.join()
    assert set(threading.enumerate()) == before
    assert step(data).isfinite().all()


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

    step = step_of(Looking(), 3, device_iterations=2)
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    step(x, y)
    assert seen[0] == [x[2 * i :].data_ptr() for i in range(6)]
    assert sorted(seen[1]) == sorted(t[2 * i :].data_ptr() for i in range(6) for t in (x, y))


def test_a_failure_leaves_every_replica_its_own_buffers():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.total.add_(x[:, 1].sum())
            h = self.layer(x * trip(x))
            return F.mse_loss(h, x), self.total * 1

    step = step_of(Counting(), 1, replicas=2, strategy=Strategy())
    data = torch.zeros(4, 8)
    data[:2, 1], data[2:, 1] = 1.0, 10.0  # the first replica counts 2 per call, the second 20
    assert step(data)[1].tolist() == [2, 20]
    marked = data.clone()
    marked[2, 0] = 77  # the second replica fails, after the first has counted
    fails_at[:] = [77]
    try:
        with pytest.raises(ExecutionError, match="tripped"):
            step(marked)
    finally:
        fails_at.clear()
    first, second = step.executable.tensor("total", 0), step.executable.tensor("total", 1)
    before = first.item(), second.item()
    assert before[1] != before[0]
    assert step(data)[1].tolist() == [before[0] + 2, before[1] + 20]
