"""Check that models compiled with torch.compile(backend="ipu") train as plain PyTorch does."""

import pytest
import torch

import ipu_dynamo
from ipu_dynamo.torch_compile.backend import ipu
from tests.models import CASES, Case

STEPS = 10
RATE = 0.05


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


def train(model: torch.nn.Module, call, batch) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, _ = call(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def plain():
    """Losses and tensors of each model after training in plain PyTorch, computed once."""
    known = {}

    def result(case: Case):
        if case.name not in known:
            model, batch = case.build()
            known[case.name] = train(model, model, batch), model.state_dict()
        return known[case.name]

    return result


@pytest.mark.few(1)
@pytest.mark.parametrize(("case", "ipus", "engine"), VARIANTS)
def test_trains_like_eager(case, ipus, engine, plain):
    expected_losses, expected = plain(case)
    model, batch = case.build()
    stages = case.place(model, ipus)
    compiled = torch.compile(model, backend=ipu, fullgraph=True, options={"engine": engine})
    with torch._dynamo.config.patch(allow_rnn=case.rnn):
        losses = train(model, compiled, batch)

    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for name, tensor in model.state_dict().items():
        limit = 1e-4 * expected[name].abs().max().item() + 1e-6
        difference = (tensor - expected[name]).abs().max().item()
        assert difference <= limit, f"{name}: {difference:.2e}, allowed {limit:.2e}"
    forward, backward = ipu_dynamo.programs()  # two: nothing was compiled twice
    for program, kind in ((forward, "forward"), (backward, "backward")):
        assert program.kind == kind
        assert program.num_ipus == ipus
        assert program.num_stages == stages
        assert len(program.copies) >= stages - 1
    assert {call.direction for call in backward.calls} == {"backward"}


def test_tied_model_comes_home():
    """The head is on IPU 0 again, beside the embedding whose weight it uses: no copy of it."""
    case = next(case for case in CASES if case.name == "tied")
    model, batch = case.build()
    case.place(model, 4)
    torch.compile(model, backend=ipu, fullgraph=True, options={"engine": "eager"})(**batch)
    forward, backward = ipu_dynamo.programs()
    assert [call.ipu for call in forward.calls] == [0, 1, 2, 3, 0]
    assert [call.ipu for call in backward.calls] == [0, 3, 2, 1, 0]
    assert [v.ipu for v in forward.variables if v.name == "embedding.weight"] == [0]
    assert not [copy for copy in forward.copies if copy.value == "embedding.weight"]
