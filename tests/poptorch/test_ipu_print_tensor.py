"""Check poptorch.ipu_print_tensor: what it prints from a program, and what it refuses."""

import inspect

import pytest
import torch
from torch import nn

import poptorch


@pytest.fixture
def options():
    return poptorch.Options().showCompilationProgressBar(False)


class Model(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.layer, self.settings = nn.Linear(2, 2, bias=False), settings
        nn.init.eye_(self.layer.weight)

    def forward(self, x):
        h = poptorch.ipu_print_tensor(self.layer(x), **self.settings)
        return h, poptorch.identity_loss(h, reduction="sum")


def test_has_the_arguments_of_poptorch():
    parameters = inspect.signature(poptorch.ipu_print_tensor).parameters.values()
    assert [(p.name, p.default) for p in parameters][1:] == [
        ("title", ""),
        ("print_gradient", True),
        ("summarise_threshold", 1000),
        ("edge_items", 3),
        ("max_line_width", 80),
        ("digits", 4),
        ("float_format", "auto"),
        ("separator", ", "),
        ("open_bracket", "("),
        ("close_bracket", ")"),
    ]


def test_prints_on_every_micro_batch_and_replica(options, capfd):
    model = poptorch.inferenceModel(Model(), options.deviceIterations(2).replicationFactor(2))
    x = torch.arange(8.0).view(4, 2)
    assert torch.equal(model(x)[0], x)
    rows = [
        "layer/MatMul:0: (\n (0.000, 1.000)\n)\n",
        "layer/MatMul:0: (\n (2.000, 3.000)\n)\n",
        "layer/MatMul:0: (\n (4.000, 5.000)\n)\n",
        "layer/MatMul:0: (\n (6.000, 7.000)\n)\n",
    ]
    assert capfd.readouterr().err == "".join(rows)


def test_prints_the_gradient_under_its_own_title(options, capfd):
    for print_gradient in (True, False):
        module = Model(title="h", print_gradient=print_gradient, float_format="none")
        poptorch.trainingModel(module, options)(torch.ones(1, 2))
        gradient = "h_gradient: (\n (1, 1)\n)\n" if print_gradient else ""
        assert capfd.readouterr().err == f"h: (\n (1, 1)\n)\n{gradient}"


def test_prints_nothing_on_the_cpu(capfd):
    x = torch.ones(2)
    assert poptorch.ipu_print_tensor(x, "x") is x
    assert capfd.readouterr().err == ""


def test_refuses_what_it_cannot_print():
    with pytest.raises(poptorch.Error, match=r"torch\.tensor"):
        poptorch.ipu_print_tensor([1.0])
    with pytest.raises(KeyError, match="hex"):
        poptorch.ipu_print_tensor(torch.ones(1), float_format="hex")
    with pytest.raises(poptorch.Error, match="digits"):
        poptorch.ipu_print_tensor(torch.ones(1), digits=0)
