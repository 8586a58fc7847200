"""Check that phased strategies run as phases, and the errors of impossible ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import poptorch
from ipu_dynamo.program import Load, Store
from poptorch import Liveness, Phase, Stage

DATA = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Chain(nn.Module):
    """Layers in the blocks "0", "1", ..."""

    def __init__(self, count, ipus=()):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        for i, layer in enumerate(self.layers):
            poptorch.BeginBlock(layer, str(i), ipu_id=ipus[i] if ipus else None)

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h, F.mse_loss(h, x)


def training(strategy, count=3, ipus=()):
    options = poptorch.Options().setExecutionStrategy(strategy).outputMode(poptorch.OutputMode.All)
    options.showCompilationProgressBar(False).useIpuModel(True)
    options.Training.gradientAccumulation(2)
    model = Chain(count, ipus)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, options, optimizer), model


def phases_of(executor):
    return [call.phase for call in executor._core.program.calls]


def plain():
    """Losses and weights of two steps without an executor."""
    model = Chain(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        parts = [model(x)[1] for x in DATA.chunk(2)]
        (sum(parts) / 2).backward()
        optimizer.step()
        losses.append(torch.stack(parts).detach())
    return losses, model.state_dict()


SERIAL = poptorch.SerialPhasedExecution
PARALLEL = poptorch.ParallelPhasedExecution
CASES = {
    "AlwaysLive": (lambda: SERIAL("0", "1", "2"), [0, 1, 2, 3, 4]),
    "separate": (
        lambda: SERIAL("0", "1", "2").useSeparateBackwardPhase(),
        [0, 1, 2, 4, 5, 6],
    ),
    "OffChipAfterFwd": (
        lambda: SERIAL("0", "1", "2").setTensorsLiveness(Liveness.OffChipAfterFwd),
        [0, 1, 2, 6, 7, 8],
    ),
    "OffChipAfterFwdNoOverlap": (
        lambda: SERIAL("0", "1", "2").setTensorsLiveness(Liveness.OffChipAfterFwdNoOverlap),
        [0, 2, 4, 8, 10, 12],
    ),
    "OffChipAfterEachPhase": (
        lambda: SERIAL("0", "1", "2").setTensorsLiveness(Liveness.OffChipAfterEachPhase),
        [0, 4, 8, 12, 16, 20],
    ),
    "parallel": (lambda: PARALLEL("0", "1", "2"), [0, 1, 2, 3, 4]),
    "parallel off chip": (
        lambda: PARALLEL("0", "1", "2").sendTensorsOffChipAfterFwd(),
        [0, 1, 2, 6, 7, 8],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_liveness_trains_as_pytorch_does_in_its_own_phases(case):
    make, expected = CASES[case]
    strategy = make()
    for number in range(3):
        strategy.phase(number).ipus(number % 2)
    executor, model = training(strategy)
    losses = [executor(DATA)[1] for _ in range(2)]
    assert phases_of(executor) == expected
    their_losses, theirs = plain()
    torch.testing.assert_close(losses, their_losses)
    torch.testing.assert_close(dict(model.state_dict()), dict(theirs))
    program = executor._core.program
    moves = [i for i in program.walk() if isinstance(i, Store | Load) and i.value != i.result]
    assert bool(moves) == (case not in ("AlwaysLive", "separate", "parallel"))
    assert all(v.off_chip for v in program.variables)  # the default in phases
    assert executor._core.executable.memory.traffic == program.traffic * 2


def test_blocks_take_their_own_ipu_where_the_strategy_has_none():
    executor, _ = training(SERIAL("0", Phase(Stage("1"), Stage("2").ipu(2))), ipus=[1, 3, 0])
    executor.compile(DATA)
    forward = [c for c in executor._core.program.calls if c.direction != "backward"]
    assert [(call.phase, call.ipu) for call in forward] == [(0, 1), (1, 3), (1, 2)]


def test_a_block_without_an_ipu_is_an_error_that_names_it():
    executor, _ = training(SERIAL("0", "1", "2"), ipus=[0, None, 1])
    with pytest.raises(poptorch.Error, match="block '1' of phase 1 has no IPU"):
        executor(DATA)


def test_a_block_in_no_phase_is_an_error():
    executor, _ = training(SERIAL("0", "1"), ipus=[0, 1, 0])
    with pytest.raises(poptorch.Error, match="Invalid phase for ExecutionMode::Phased"):
        executor(DATA)


@given(ipus=st.lists(st.integers(0, 3), min_size=2, max_size=2), own=st.booleans())
def test_parallel_phases_and_their_ipus_have_one_parity(ipus, own):
    strategy = PARALLEL("0", "1")
    if not own:
        for number, ipu in enumerate(ipus):
            strategy.phase(number).ipus(ipu)
    executor, _ = training(strategy, 2, ipus if own else ())
    if ipus[0] % 2 == 0 and ipus[1] % 2 == 1:
        executor.compile(DATA)
        assert [call.ipu for call in executor._core.program.calls][:2] == ipus
    else:
        with pytest.raises(poptorch.Error, match="even phases must run on even IPUs and odd ph"):
            executor.compile(DATA)


def test_inference_runs_the_forward_phases():
    strategy = SERIAL("0", "1", "2").setTensorsLiveness(Liveness.OffChipAfterEachPhase)
    for number in range(3):
        strategy.phase(number).ipus(0)
    options = poptorch.Options().setExecutionStrategy(strategy)
    model = Chain(3)
    executor = poptorch.inferenceModel(model, options)
    torch.testing.assert_close(executor(DATA)[0], model(DATA)[0].detach())
    assert phases_of(executor) == [0, 4, 8]
    moved = executor._core.executable.memory.traffic
    assert moved.stored > 0
    assert moved == executor._core.program.traffic
