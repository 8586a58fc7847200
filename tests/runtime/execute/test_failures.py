"""Check that a failure or an interrupt stops all workers, is explained, and leaves no trace."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ipu_dynamo import (
    BeginBlock,
    Options,
    ReplicaGroups,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.errors import ExecutionError
from tests.runtime.execute.tasks.test_workers import Chain, step_of

ARMED: list[tuple[int, bool]] = []  # (stage, in its backward pass) that fails on marked rows
MARK = 77.0


def trip_if_armed(x: Tensor, stage: int, backward: bool) -> None:
    if (stage, backward) in ARMED and bool((x[:, 0] == MARK).any()):
        raise ValueError(f"tripped in stage {stage}")


@torch.library.custom_op("ipu_test::trip", mutates_args=())
def trip(h: Tensor, x: Tensor, stage: int) -> Tensor:
    trip_if_armed(x, stage, backward=False)
    return h.clone()


@torch.library.custom_op("ipu_test::trip_backward", mutates_args=())
def trip_backward(gradient: Tensor, x: Tensor, stage: int) -> Tensor:
    trip_if_armed(x, stage, backward=True)
    return gradient.clone()


def _remember(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.stage = inputs[2]


def _backward(ctx, gradient):
    return trip_backward(gradient, *ctx.saved_tensors, ctx.stage), None, None


trip.register_fake(lambda h, x, stage: torch.empty_like(h))
trip_backward.register_fake(lambda gradient, x, stage: torch.empty_like(gradient))
trip.register_autograd(_backward, setup_context=_remember)


@pytest.fixture(autouse=True)
def disarm():
    yield
    ARMED.clear()


class Tripping(nn.Module):
    """Stages with statistics, each of which can fail."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(stages)
        )
        for ipu, layer in enumerate(self.layers):
            BeginBlock(layer, ipu_id=ipu)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for stage, layer in enumerate(self.layers):
            h = trip(torch.tanh(layer(h)), x, stage)
        return F.mse_loss(h, torch.zeros_like(h))


def tripping(stages, accumulation, **options):
    torch.manual_seed(0)
    model = Tripping(stages)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    chosen = {"engine": "eager", "strategy": Strategy("pipelined"), "output_mode": "all"}
    chosen = Options(gradient_accumulation=accumulation, **chosen | options)
    return compile_training(model, optimizer, chosen)


def state(step):
    """All that a step leaves behind: parameters, buffers, the optimiser's state."""
    step.read_optimizer_state()
    states = [v for of in step._link.optimizer.state.values() for v in of.values()]
    return [torch.as_tensor(v).clone() for v in (*step.model.state_dict().values(), *states)]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("workers", "replicas", "count"),
    [(1, 1, 20), (2, 1, 40), (9, 2, 40)],
)
def test_a_failure_names_its_place_and_leaves_no_trace(workers, replicas, count):
    stages, accumulation = 3, 5
    rows = accumulation * replicas * 2
    step = tripping(stages, accumulation, workers=workers, replicas=replicas)
    unharmed = tripping(stages, accumulation, workers=1, replicas=replicas)
    random = torch.Generator().manual_seed(0)
    step(torch.randn(rows, 8, generator=random.manual_seed(1)))
    unharmed(torch.randn(rows, 8, generator=random.manual_seed(1)))
    for trial in range(count):
        data = torch.randn(rows, 8, generator=random)
        place, stage = (int(torch.randint(n, (), generator=random)) for n in (rows // 2, stages))
        backward = bool(torch.randint(2, (), generator=random))
        marked = data.clone()
        marked[2 * place, 0] = MARK
        ARMED[:] = [(stage, backward)]
        threads, before = set(threading.enumerate()), state(step)
        with pytest.raises(ExecutionError, match=f"tripped in stage {stage}") as caught:
            step(marked)
        error = caught.value
        assert (error.stage, error.micro_batch) == (stage, place)
        assert "call @" in error.instruction
        assert "h = trip(torch.tanh(layer(h)), x, stage)" in error.where
        assert set(threading.enumerate()) == threads
        assert same(state(step), before)
        ARMED.clear()
        assert torch.equal(step(data), unharmed(data))
        if trial % 10 == 9:
            assert same(state(step), state(unharmed))
    fresh = tripping(stages, accumulation, workers=1, replicas=replicas)
    if replicas == 1:  # else the second replica's buffers are its own
        fresh.model.load_state_dict(unharmed.model.state_dict())
        unharmed.read_optimizer_state()
        fresh._link.optimizer.load_state_dict(unharmed._link.optimizer.state_dict())
        data = torch.randn(rows, 8, generator=random)
        assert torch.equal(step(data), fresh(data))
        assert same(state(step), state(fresh))


def test_a_failure_keeps_the_complete_steps_of_its_call():
    step = tripping(2, 3, device_iterations=3)
    other = tripping(2, 3)
    data = torch.randn(3 * 3 * 2, 8)
    step.compile(data)
    marked = data.clone()
    marked[2 * 7, 0] = MARK  # in the third step
    ARMED[:] = [(0, True)]
    with pytest.raises(ExecutionError, match="micro-batch 7"):
        step(marked)
    for part in data[:12].chunk(2):
        other(part)
    assert same(state(step), state(other))


def test_a_failure_of_an_inference_keeps_the_statistics_of_the_calls_before():
    model = Tripping(2)
    chosen = Options(engine="eager", device_iterations=4, strategy=Strategy("pipelined"))
    program = compile_inference(model, chosen)
    data = torch.randn(8, 8)
    program(data)
    before = [b.clone() for b in model.buffers()]
    data[4, 0] = MARK
    ARMED[:] = [(1, False)]
    with pytest.raises(ExecutionError, match="stage: 1, micro-batch 2"):
        program(data)
    assert same(model.buffers(), before)


def test_a_failure_leaves_every_replica_its_own_buffers():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.total.add_(x[:, 1].sum())
            return F.mse_loss(self.layer(trip(x, x, 0)), x), self.total * 1

    step = step_of(Counting(), 1, replicas=2, strategy=Strategy())
    data = torch.zeros(4, 8)
    data[:2, 1], data[2:, 1] = 1.0, 10.0  # the first replica counts 2 per call, the second 20
    assert step(data)[1].tolist() == [2, 20]
    marked = data.clone()
    marked[2, 0] = MARK  # the second replica fails, after the first has counted
    ARMED[:] = [(0, False)]
    with pytest.raises(ExecutionError, match="tripped"):
        step(marked)
    ARMED.clear()
    assert step(data)[1].tolist() == [4, 40]


def test_a_failure_leaves_every_group_its_own_buffers():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 8))
            self.register_buffer("total", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x[:, 1].sum())
            return F.mse_loss(trip(x, x, 0) * self.weight, x - 1)

    groups = {"weight": ReplicaGroups(1), "total": ReplicaGroups(1)}
    step = step_of(Counting(), 2, replicas=2, strategy=Strategy(), replica_groups=groups)
    data = torch.zeros(8, 8)
    data[::4, 1], data[3::4, 1] = 1.0, 10.0  # the first replica counts 2 per call, the second 20
    step(data)
    assert step.model.total.tolist() == [2, 20]
    assert not torch.equal(*step.model.weight)
    before = [t.clone() for t in step.model.state_dict().values()]
    marked = data.clone()
    marked[7, 0] = MARK  # the second replica fails in its last micro-batch
    ARMED[:] = [(0, False)]
    with pytest.raises(ExecutionError, match="tripped"):
        step(marked)
    ARMED.clear()
    assert same(step.model.state_dict().values(), before)
    step(data)
    assert step.model.total.tolist() == [4, 40]


@torch.library.custom_op("ipu_test::slow", mutates_args=())
def slow(x: Tensor) -> Tensor:
    time.sleep(0.02)
    return x.clone()


slow.register_fake(torch.empty_like)
slow.register_autograd(lambda ctx, gradient: gradient)


class Slow(Chain):
    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(slow(self.norm(x)))


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_stops_all_workers_and_leaves_no_trace(workers):
    torch.manual_seed(0)
    model = Slow(2)
    step = step_of(model, 40, workers=workers)  # of 0.8 s at least
    data = torch.randn(80, 8)
    step.compile(data)
    before = [value.clone() for value in model.state_dict().values()]
    threads = set(threading.enumerate())
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        step(data)
    timer.join()
    assert set(threading.enumerate()) == threads
    assert same(model.state_dict().values(), before)
    torch.manual_seed(0)
    fresh = Slow(2)
    assert torch.equal(step(data), step_of(fresh, 40, workers=1)(data))
    assert same(model.state_dict().values(), fresh.state_dict().values())


def test_a_failure_in_one_thread_does_not_reach_another():
    data = torch.randn(2, 20, 10, 8)
    marked = data.clone()
    marked[1, ::2, 0, 0] = MARK
    ARMED[:] = [(1, False)]
    expected = [tripping(2, 5)(batch) for batch in data[:1, 0]]
    steps = [tripping(2, 5, workers=2) for _ in range(2)]
    for step in steps:
        step.compile(data[0, 0])
    seen: list[list] = [[], []]

    def run(index: int) -> None:
        for batch in marked[index]:
            try:
                seen[index].append(steps[index](batch))
            except ExecutionError as error:
                seen[index].append(error.micro_batch)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ARMED.clear()
    assert torch.equal(seen[0][0], expected[0])
    assert seen[1][::2] == [0] * 10
    others = [tripping(2, 5, workers=1) for _ in range(2)]
    assert same(seen[0], [others[0](batch) for batch in data[0]])
    assert same(seen[1][1::2], [others[1](batch) for batch in data[1, 1::2]])
