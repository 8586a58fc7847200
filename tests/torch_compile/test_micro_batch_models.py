"""Check that models train in a pipeline of micro-batches as plain PyTorch trains on the batch."""

import pytest
import torch
from torch import Tensor, nn

import ipu_dynamo
from ipu_dynamo.program import Program, Repeat
from ipu_dynamo.torch_compile.backend import ipu
from tests.models import CASES, Case

ROWS, MICRO_BATCHES, STEPS, RATE = 8, 4, 3, 0.05


def variant(case: Case, ipus: int, engine: str):
    """The eager engine always; Inductor, which compiles for half a minute, in the long run."""
    marks = [] if engine == "eager" else [pytest.mark.slow, pytest.mark.inductor]
    if case.name in ("bert", "gpt2", "lstm") and ipus != 4:
        marks.append(pytest.mark.slow)
    return pytest.param(case, ipus, engine, marks=marks, id=f"{case.name}-{ipus}-{engine}")


VARIANTS = [
    variant(case, ipus, engine)
    for case in CASES
    for ipus in (1, 2, 4)
    for engine in ("eager", "inductor")
]


def build(case: Case) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and a batch of ROWS rows that all differ from each other."""
    model, batch = case.build()
    copies = {name: torch.cat([t, t.flip(-1), t.roll(1, -1)]) for name, t in batch.items()}
    if "labels" in batch:
        labels = copies["labels"]
        copies["labels"] = labels if labels.dim() > 1 else labels.roll(2)
    return model, {name: tensor[:ROWS] for name, tensor in copies.items()}


def averaged_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A step as documented for batch norm: each part has its statistics; buffers are averaged."""
    parts = [
        dict(zip(batch, values, strict=True))
        for values in zip(*(t.chunk(MICRO_BATCHES) for t in batch.values()), strict=True)
    ]
    before = [buffer.clone() for buffer in model.buffers()]
    after, total = [], torch.zeros(())
    for part in parts:
        for buffer, old in zip(model.buffers(), before, strict=True):
            buffer.copy_(old)
        loss = model(**part)[0] / MICRO_BATCHES
        loss.backward()
        total += loss.detach()
        after.append([buffer.clone() for buffer in model.buffers()])
    for buffer, *found in zip(model.buffers(), *after, strict=True):
        buffer.copy_(torch.stack(found).double().mean(0))
    return total


def whole_step(call, batch: dict[str, Tensor]) -> Tensor:
    loss, _ = call(**batch)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, step, batch: dict[str, Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(batch).item())
        optimizer.step()
    return losses


def pipeline_of(kind: str) -> Program:
    """The program of a pass that runs the micro-batches."""
    (found,) = (
        program
        for program in ipu_dynamo.programs()
        if program.kind == kind
        and any(isinstance(i, Repeat) and i.count == MICRO_BATCHES for i in program.walk())
    )
    return found


@pytest.mark.few(1, 1)
@pytest.mark.parametrize(("case", "ipus", "engine"), VARIANTS)
def test_trains_like_eager(case, ipus, engine):
    plain, batch = build(case)
    has_norm = any(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
    expected = train(
        plain,
        (lambda b: averaged_step(plain, b)) if has_norm else (lambda b: whole_step(plain, b)),
        batch,
    )

    model, _ = build(case)
    stages = case.place(model, ipus)
    options = {"engine": engine, "micro_batches": MICRO_BATCHES}
    call = torch.compile(model, backend=ipu, fullgraph=True, options=options)
    with torch._dynamo.config.patch(allow_rnn=case.rnn):
        losses = train(model, lambda b: whole_step(call, b), batch)

    assert losses == pytest.approx(expected, rel=1e-4)
    wanted = plain.state_dict()
    for name, tensor in model.state_dict().items():
        limit = 1e-4 * wanted[name].abs().max().item() + 1e-6
        difference = (tensor - wanted[name]).abs().max().item()
        assert difference <= limit, f"{name}: {difference:.2e}, allowed {limit:.2e}"
    for kind in ("forward", "backward"):
        program = pipeline_of(kind)
        assert program.num_ipus == ipus
        assert program.num_stages == stages
        assert len(program.copies) >= stages - 1
