"""Check `poptorch.MultiConv` from PopTorch programs."""

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.program import GROUP
from poptorch import MultiConv, MultiConvPlanType


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')


class Model(nn.Module):
    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(8, 4, 5), nn.Conv2d(8, 4, 5)
        self.group = group

    def forward(self, x):
        with self.group:
            return self.a(x), self.b(x * x)


def run(group, *, dtype=torch.float32, options=None):
    model = Model(group).to(dtype)
    x = torch.randn(2, 8, 12, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    executor = poptorch.inferenceModel(model, options)
    return executor(x), model(x), executor


def places(executor):
    operators = executor._core.program.functions[0].operators
    return [node.meta[GROUP] for node in operators if GROUP in node.meta]


def test_setters_chain_and_change_no_value():
    group = (
        MultiConv()
        .availableMemoryProportions([0.8, 0.1])
        .partialsTypes(torch.float)
        .planType(MultiConvPlanType.Serial)
        .perConvReservedTiles(100)
        .cycleBackOff(0.3)
        .enableConvDithering((True, False))
    )
    ours, plain, executor = run(group)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert places(executor) == ["serial 1/2", "serial 2/2"]


def test_partials_of_each_convolution():
    both, _, _ = run(MultiConv().partialsTypes([torch.half, torch.float]), dtype=torch.half)
    floats, _, _ = run(MultiConv(), dtype=torch.half)
    options = poptorch.Options()
    options.Precision.setPartialsType(torch.half)
    halves, _, _ = run(MultiConv(), dtype=torch.half, options=options)
    assert torch.equal(both[0], halves[0])
    assert not torch.equal(both[0], floats[0])
    assert torch.equal(both[1], floats[1])
    assert not torch.equal(both[1], halves[1])


@pytest.mark.parametrize("shares", [0.25, [0.75, 0.0]])
def test_shares_of_memory_are_in_the_program_for_each_convolution(shares):
    executor = run(MultiConv().availableMemoryProportions(shares))[-1]
    operators = executor._core.program.functions[0].operators
    found = [node.meta["ipu.memory"] for node in operators if GROUP in node.meta]
    assert found == (shares if isinstance(shares, list) else [shares] * 2)
    assert "ipu.memory" not in run(MultiConv())[-1]._core.program.text()


def test_nested():
    class Nested(Model):
        def forward(self, x):
            with MultiConv():
                return super().forward(x)

    executor = poptorch.inferenceModel(Nested(MultiConv()))
    with pytest.raises(poptorch.Error, match=r"Nested poptorch.MultiConv is not supported"):
        executor(torch.ones(1, 8, 9, 9))


def test_without_convolutions():
    class Empty(nn.Module):
        def forward(self, x):
            with MultiConv():
                return x * 2

    with pytest.raises(poptorch.Error, match="Unexpected end_multi_conv"):
        poptorch.inferenceModel(Empty())(torch.ones(2))


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (MultiConv().partialsTypes([torch.half] * 3), "3 convolutions, and has 2"),
        (MultiConv().availableMemoryProportions([0.1] * 3), "3 convolutions, and has 2"),
        (
            MultiConv().partialsTypes([torch.half] * 2).enableConvDithering([True] * 3),
            "partialsTypes for 2, enableConvDithering for 3",
        ),
    ],
)
def test_settings_for_another_number_of_convolutions(group, text):
    with pytest.raises(poptorch.Error, match=text):
        run(group)


@pytest.mark.parametrize(
    ("setter", "value", "error"),
    [
        ("availableMemoryProportions", "half", AssertionError),
        ("availableMemoryProportions", [], AssertionError),
        ("availableMemoryProportions", [0.5, 1], AssertionError),
        ("availableMemoryProportions", 1.0, ValueError),
        ("availableMemoryProportions", (0.1, -0.1), ValueError),
        ("partialsTypes", "half", ValueError),
        ("partialsTypes", None, ValueError),
        ("partialsTypes", [torch.half, torch.int], ValueError),
        ("enableConvDithering", 1, ValueError),
        ("enableConvDithering", [True, None], ValueError),
        ("planType", "parallel", AssertionError),
        ("planType", 0, AssertionError),
        ("perConvReservedTiles", 1.0, AssertionError),
        ("cycleBackOff", "1", AssertionError),
        ("cycleBackOff", 1.5, ValueError),
        ("cycleBackOff", -1, ValueError),
    ],
)
def test_wrong_settings(setter, value, error):
    with pytest.raises(error):
        getattr(MultiConv(), setter)(value)
