"""Check that parallel phases alternate between two groups of IPUs, side by side."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from ipu_dynamo import (
    BeginBlock,
    Block,
    Options,
    StageSpec,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.program import Call
from ipu_dynamo.program.schedule.dependencies import dependencies
from ipu_dynamo.program.schedule.phased_schedule import alternating
from ipu_dynamo.testing import assert_same_bits


def calls_of(phases: list[int]) -> list[Call]:
    """One call in each phase, on the IPU of its parity."""
    return [
        Call(f"call{p}", p % 2, i, "forward", (), (), "model.py:1", p) for i, p in enumerate(phases)
    ]


def in_order(count: int) -> list[tuple[int, ...]]:
    """Every call waits for all earlier ones."""
    return [tuple(range(index)) for index in range(count)]


def parallel(*ipus: int, **settings) -> Strategy:
    phases = tuple((StageSpec((f"phase {i}",), ipu),) for i, ipu in enumerate(ipus))
    return Strategy("parallel_phased", phases=phases, **settings)


def test_prints_two_micro_batches_one_phase_apart():
    schedule = alternating(calls_of([0, 1, 2, 3]), in_order(4), micro_batches=3)
    assert schedule.grid() == "ipu0  0  1  0  1  2  .  2  .\nipu1  .  0  1  0  1  2  .  2"


@given(
    turns=st.integers(1, 4),
    micro_batches=st.integers(1, 7),
    replicas=st.integers(1, 3),
    workers=st.integers(1, 5),
)
def test_finishes_every_task_once_and_a_group_has_one_micro_batch_at_a_time(
    turns, micro_batches, replicas, workers
):
    calls = calls_of([*range(turns), *range(turns + 1, 2 * turns + 1)])
    settings = {"micro_batches": micro_batches, "replicas": replicas, "workers": workers}
    schedule = alternating(calls, in_order(len(calls)), **settings)
    tasks = [task for of in schedule.runs for task in of]
    assert len(schedule.workers) <= workers
    names = {(t.index, t.micro_batch, t.replica) for t in tasks}
    assert len(tasks) == len(names) == len(calls) * micro_batches * replicas
    assert list(map(len, schedule.timed().workers)) == list(map(len, schedule.workers))
    groups = [(t.cycle, t.replica, calls[t.index].ipu) for t in tasks]
    assert len(groups) == len(set(groups))
    for cycle in range(schedule.cycles):
        assert len({t.micro_batch for t in tasks if t.cycle == cycle}) <= 2
    for of in schedule.runs:
        assert list(of) == sorted(of)


class Branches(nn.Module):
    """Two branches that need nothing of each other, in phases 0 and 1, and their sum in phase 2."""

    def __init__(self, probe=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.probe = probe or (lambda h, x, branch: h)

    def forward(self, x: Tensor) -> Tensor:
        halves = []
        for branch, layer in enumerate(self.layers[:2]):
            with Block(f"phase {branch}"):
                halves.append(self.probe(torch.tanh(layer(x)), x, branch))
        with Block("phase 2"):
            return F.mse_loss(self.layers[2](halves[0] + halves[1]), x)


def train(model, accumulation, strategy, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"engine": "eager", "output_mode": "all", "workers": 9} | options
    options = Options(gradient_accumulation=accumulation, strategy=strategy, **chosen)
    return compile_training(model, optimizer, options)


def test_a_call_waits_for_what_it_reads_only():
    step = train(Branches(), 1, parallel(0, 1, 2))
    step.compile(torch.ones(2, 8))
    names = [(call.function, call.phase) for call in step.program.calls]
    waits = dependencies(step.program)
    first, second, sum_, *_ = range(len(names))
    assert waits[first] == ()
    assert waits[second] == (first,)  # the first call begins the micro-batch
    assert waits[sum_] == (first, second)


def test_the_last_call_waits_for_all_others():
    schedule = alternating(calls_of([0, 1, 2]), [(), (0,), (0,)], micro_batches=1)
    assert [(one.source, one.target) for one in schedule.transfers] == [(0, 1), (1, 2)]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("liveness", ["always_live", "off_chip_after_fwd"])
def test_workers_change_no_bit(workers, liveness):
    data = torch.randn(2 * 5 * 2 * 3, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for strategy, count in ((Strategy(), 1), (parallel(0, 1, 2, liveness=liveness), workers)):
        model = Branches()
        step = train(model, 5, strategy, workers=count, device_iterations=2, replicas=2)
        losses = [step(data) for _ in range(2)]
        results.append((losses, dict(model.state_dict())))
    assert_same_bits(*results)
    assert len(step.executable.schedule.workers) == workers


def test_two_groups_of_ipus_work_at_once():
    """Phase 0 of the second micro-batch and phase 1 of the first one go on only together."""
    here = [threading.Event(), threading.Event()]

    @torch.library.custom_op("ipu_test::meet_in_phases", mutates_args=())
    def meet(h: Tensor, x: Tensor, branch: int) -> Tensor:
        micro_batch = int(x[0, 0])
        if branch + micro_batch == 1:
            here[branch].set()
            if not here[1 - branch].wait(timeout=60):
                raise TimeoutError(f"phase {branch} is alone at micro-batch {micro_batch}")
        return h.clone()

    meet.register_fake(lambda h, x, branch: torch.empty_like(h))
    meet.register_autograd(lambda ctx, gradient: (gradient, None, None))
    data = torch.arange(2.0).repeat_interleave(2)[:, None].repeat(1, 8)
    assert train(Branches(meet), 2, parallel(0, 1, 2))(data).isfinite().all()


def test_micro_batches_take_turns_where_one_needs_what_the_other_leaves():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.layers = nn.ModuleList(nn.Identity() for _ in range(2))
            for i, layer in enumerate(self.layers):
                BeginBlock(layer, f"phase {i}")

        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x) + self.count
            second = self.layers[1](first * 2)
            self.count.add_(1)
            return second

    model = Counting()
    options = Options("eager", 4, strategy=parallel(0, 1), workers=2)
    run = compile_inference(model, options)
    assert run(torch.zeros(4)).tolist() == [0, 2, 4, 6]
    assert model.count == 4
