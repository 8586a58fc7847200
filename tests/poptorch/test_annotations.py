"""Check names that mark parts of a model and change no value."""

import pytest
import torch

import poptorch


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')


def test_marks_change_no_value():
    layer = poptorch.Attribute(__outline={"layer": "one"})

    def forward(x):
        with layer, poptorch.Attribute(__outline={"layer": "two"}, other={}):
            x = x + 1
        with layer, layer, poptorch.NameScope("scope"):
            return poptorch.set_available_memory(x @ x, 0.3)

    x = torch.rand(2, 2)
    expected = (x + 1) @ (x + 1)
    torch.testing.assert_close(poptorch.inferenceModel(forward)(x), expected)
    torch.testing.assert_close(forward(x), expected)


@pytest.mark.parametrize("value", ["text", {"layer": 1}, {1: "layer"}, None])
def test_attributes_are_dictionaries_of_strings(value):
    with pytest.raises(AssertionError, match="__outline must be a dictionary of strings"):
        poptorch.Attribute(__outline=value)


def test_the_name_of_a_scope_is_a_string():
    with pytest.raises(AssertionError, match="must be a string"):
        poptorch.NameScope(3)


def test_errors_inside_come_out():
    with pytest.raises(KeyError), poptorch.NameScope("a"), poptorch.Attribute():
        raise KeyError


def test_nop_is_a_copy_with_a_gradient():
    w = torch.nn.Parameter(torch.tensor([2.0]))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = w

        def forward(self, x):
            copy = poptorch.nop(self.w)
            copy += 1
            return poptorch.identity_loss(copy * x + self.w, "sum")

    optimizer = poptorch.optim.SGD([w], lr=1.0)
    executor = poptorch.trainingModel(Model(), None, optimizer)
    assert executor(torch.tensor([3.0])) == (2 + 1) * 3 + 2
    assert w == 2 - (3 + 1)
    with pytest.raises(poptorch.Error, match=r"nop takes a torch\.tensor"):
        poptorch.nop([w])


def test_the_memory_of_an_operator_is_a_share():
    with pytest.raises(ValueError, match="from 0 to 1"):
        poptorch.set_available_memory(torch.ones(1), 1.5)
    with pytest.raises(poptorch.Error, match=r"takes a torch\.tensor"):
        poptorch.set_available_memory(1, 0.5)


@pytest.mark.parametrize(
    ("ref", "other", "close"),
    [
        (torch.ones(2), torch.ones(2) + 1e-7, True),
        (torch.ones(2), torch.zeros(2), False),
        ([torch.ones(2), (torch.zeros(1),)], [torch.ones(2), (torch.zeros(1),)], True),
        ([torch.ones(2), (torch.zeros(1),)], [torch.ones(2), (torch.ones(1),)], False),
        ([torch.ones(2)], (torch.ones(2),), False),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)], False),
        ("a", "b", True),
    ],
)
def test_structures_are_compared(ref, other, close):
    assert poptorch.testing.allclose(ref, other) == close
