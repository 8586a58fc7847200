"""Check that what a model reads of plain tensors is never frozen without a word."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import poptorch
from ipu_dynamo import CompileError, InputError, compile_inference, compile_training

TABLE = torch.arange(1.0, 7.0)
NUMBERS = np.arange(6.0, dtype=np.float32)
NEWS = "ignore:the tensor .* is neither an input"
pytestmark = pytest.mark.filterwarnings(NEWS)
EAGER = {"engine": "eager"}

READS = {
    "item": lambda self, h: h / self.temperature.item(),
    "index": lambda self, h: h[:, self.place],
    "end of a slice": lambda self, h: h[:, : self.place].sum(1),
    "number of an operator": lambda self, h: torch.add(h, h, alpha=self.temperature),
    "fill": lambda self, h: h + torch.full((6,), self.temperature),
    "range": lambda self, h: sum((h for _ in range(self.place)), h),
    "list": lambda self, h: h * self.temperature.tolist(),
    "NumPy": lambda self, h: h * torch.from_numpy(self.steps.numpy() * 2),
    "array of a global": lambda self, h: h * torch.from_numpy(np.asarray(TABLE) + 1),
    "array from outside": lambda self, h: h * torch.from_numpy(NUMBERS),
    "operand": lambda self, h: h * self.steps + TABLE,
    "copy": lambda self, h: h * __import__("copy").deepcopy(self.steps),
}


class Reads(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(6, 6)
        self.temperature, self.place = torch.tensor(2.0), torch.tensor(1)
        self.steps = torch.arange(2.0, 8.0)

    def forward(self, x: Tensor) -> Tensor:
        return READS[self.how](self, self.layer(x))


@pytest.mark.parametrize("how", READS)
def test_a_changed_value_is_refused_and_compiled_anew(how):
    model, x = Reads(how).eval(), torch.randn(4, 6)
    compiled = compile_inference(model, EAGER)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    before, numbers = TABLE.clone(), NUMBERS.copy()
    try:
        for tensor, value in ((model.temperature, 5), (model.place, 4), (model.steps, 1.5)):
            tensor.fill_(value)
        TABLE.mul_(2)
        NUMBERS[:] = 3
        with pytest.raises(InputError, match=r"constant\n  from: test_outside.py:\d+"):
            compiled(x)
        compiled.compile(x)
        torch.testing.assert_close(compiled(x), model(x))
    finally:
        TABLE.copy_(before)
        NUMBERS[:] = numbers


def test_another_tensor_under_the_name_counts_by_its_value(monkeypatch):
    model, x = Reads("operand").eval(), torch.randn(4, 6)
    compiled = compile_inference(model, EAGER)
    compiled(x)
    model.steps = model.steps.clone()
    compiled(x)
    model.steps = model.steps + 1
    with pytest.raises(InputError, match="the tensor steps"):
        compiled(x)
    model.steps = model.steps - 1
    monkeypatch.setitem(globals(), "TABLE", TABLE + 1)
    with pytest.raises(InputError, match="the tensor TABLE"):
        compiled(x)


@pytest.mark.parametrize("how", ["item", "NumPy", "operand"])
def test_poptorch_says_once_with_the_line_that_it_is_constant(how):
    model, x = Reads(how).eval(), torch.randn(4, 6)
    expected = model(x)
    executor = poptorch.inferenceModel(model)
    with pytest.warns(UserWarning, match=r"becomes a constant of the program\n  from: test_out"):
        torch.testing.assert_close(executor(x), expected)
    model.temperature.fill_(5), model.steps.fill_(3)
    torch.testing.assert_close(executor(x), expected)


def test_a_parameter_that_python_keeps_elsewhere_is_the_models():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.all = [self.weight]

        def forward(self, x):
            return (x * self.all[0]).sum()

    model, x = Kept(), torch.arange(3.0)
    compile_training(model, torch.optim.SGD(model.parameters(), 0.5), EAGER, loss=0)(x)
    torch.testing.assert_close(model.weight.detach(), 1 - 0.5 * x)


def test_a_table_without_numbers_stays_as_it_is():
    table = torch.tensor([1.0, float("nan")])
    compiled = compile_inference(lambda x: x * table, EAGER)
    for _ in range(2):
        assert compiled(torch.ones(2))[1].isnan()


class Data(nn.Linear):
    def __init__(self, how):
        super().__init__(3, 2)
        self.how = how

    def forward(self, x):
        y = super().forward(x)
        if self.how == "weight":
            return nn.functional.linear(y, self.weight.data.t())
        if self.how == "input":
            return y * (x.data[:, :2] > 0)
        if self.how == "gradient":
            return y * y.data
        y.data = 2 * y.detach()
        return y


@pytest.mark.parametrize("how", ["weight", "input", "gradient"])
def test_data_of_a_tensor_is_the_tensor_without_its_history(how):
    x, model, plain = torch.randn(2, 3), Data(how), Data(how)
    plain.load_state_dict(model.state_dict())
    plain(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)

    def loss(x):
        return model(x).sum()

    module = nn.Module()
    module.inner, module.forward = model, loss
    compile_training(module, optimizer, EAGER, loss=0)(x)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - theirs.grad)


def test_an_assignment_to_data_is_refused_with_its_line():
    with pytest.raises(CompileError, match=r"\.data[\s\S]*y\.data = 2 \* y\.detach\(\)"):
        compile_inference(Data("assigned"), EAGER)(torch.randn(2, 3))


def test_backends_of_torch_compile_take_new_values():
    model, x = Reads("operand").eval(), torch.randn(4, 6)
    compiled = torch.compile(model, backend="ipu", options=EAGER)
    compiled(x)
    model.steps.fill_(3)
    torch.testing.assert_close(compiled(x), model(x))
