"""Check that whole training steps of models, as one program, train as plain PyTorch does."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ipu_dynamo
import poptorch
from tests.models import CASES, Case

STEPS = 10
RATE = 0.05
ACCUMULATION = 9  # a pipeline of 5 stages wants 2 * 5 - 1 micro-batches


def in_ci(case: Case, ipus: int, engine: str) -> object:
    """The eager engine on four IPUs, and on one where it takes a second; Inductor, which compiles
    for half a minute, on one placement."""
    if engine == "inductor":
        quick = (case.name, ipus) == ("tied", 4)
    else:
        quick = ipus == 4 or (ipus == 1 and case.name not in ("bert", "gpt2"))
    marks = [] if quick else [pytest.mark.slow]
    marks += [pytest.mark.inductor] if engine == "inductor" else []
    return pytest.param(case, ipus, engine, marks=marks, id=f"{case.name}-{ipus}-{engine}")


VARIANTS = [
    in_ci(case, ipus, engine)
    for case in CASES
    for ipus in (1, 2, 4)
    for engine in ("eager", "inductor")
]


def call_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """One call's input: the batch again and again, rows rotated so that micro-batches differ."""
    return {
        name: torch.cat([tensor.roll(i, 0) for i in range(ACCUMULATION)])
        for name, tensor in batch.items()
    }


def train_plainly(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for i in range(ACCUMULATION):
            loss, _ = model(**{name: tensor.roll(i, 0) for name, tensor in batch.items()})
            (loss / ACCUMULATION).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def test_rounding_decides_no_sign_in_the_cnn(monkeypatch):
    """Else its gradients differ by far more than the rounding, and nobody's would be wrong."""
    (case,) = (case for case in CASES if case.name == "cnn")
    nearest = []

    def relu(x: Tensor, *rest: object, **named: object) -> Tensor:
        sizes = x.detach().abs()
        nearest.append((sizes.min() / sizes.max()).item())
        return x.clamp_min(0)

    monkeypatch.setattr(F, "relu", relu)
    model, batch = case.build()
    train_plainly(model.double(), {**batch, "x": batch["x"].double()})
    assert len(nearest) == STEPS * ACCUMULATION * 7
    assert min(nearest) > 5e-6  # forty times float32's resolution


@pytest.fixture(scope="module")
def plain():
    """Losses and tensors of each model after training in plain PyTorch, computed once."""
    known = {}

    def result(case: Case):
        if case.name not in known:
            model, batch = case.build()
            known[case.name] = train_plainly(model, batch), model.state_dict()
        return known[case.name]

    return result


def assert_near(model: nn.Module, expected: dict[str, Tensor], skipped: str = "") -> None:
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or (skipped and name.endswith(skipped)):
            continue
        limit = 1e-4 * expected[name].abs().max().item() + 1e-6
        difference = (tensor - expected[name]).abs().max().item()
        assert difference <= limit, f"{name}: {difference:.2e}, allowed {limit:.2e}"


@pytest.mark.few(1, 2)
@pytest.mark.parametrize(("case", "ipus", "engine"), VARIANTS)
def test_core_trains_like_eager(case, ipus, engine, plain):
    expected_losses, expected = plain(case)
    model, batch = case.build()
    stages = case.place(model, ipus)
    step = ipu_dynamo.compile_training(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        {"engine": engine, "gradient_accumulation": ACCUMULATION, "output_mode": "all"},
    )
    losses = [step(**call_batch(batch))[0] for _ in range(STEPS)]

    assert torch.cat(losses).tolist() == pytest.approx(expected_losses, rel=1e-4)
    assert_near(model, expected)
    assert (step.program.num_ipus, step.program.num_stages) == (ipus, stages)
    assert len(step.program.copies) >= 2 * (stages - 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(("case", "ipus", "engine"), VARIANTS)
def test_facade_trains_like_eager(case, ipus, engine, plain, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", engine)
    expected_losses, expected = plain(case)
    model, batch = case.build()
    stages = case.place(model, ipus)
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(ACCUMULATION)
    options.showCompilationProgressBar(False)
    shared_by_ipus = case.name == "gpt2" and ipus > 1  # its head reads the embedding's weight
    if stages > ipus or shared_by_ipus:
        increment = poptorch.AutoStage.AutoIncrement
        options.setExecutionStrategy(poptorch.ShardedExecution(increment))
    step = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=RATE))
    losses = [step(**call_batch(batch))[0] for _ in range(STEPS)]

    assert torch.cat(losses).tolist() == pytest.approx(expected_losses, rel=1e-4)
    assert_near(model, expected)
    program = ipu_dynamo.programs()[-1]
    assert (program.num_ipus, program.num_stages) == (ipus, stages)
    assert len(program.copies) >= 2 * (stages - 1)
