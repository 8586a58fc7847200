"""Check that what a model reads of plain tensors is never frozen without a word."""

import copy
import dataclasses
import functools
import types

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
    "copy": lambda self, h: h * copy.deepcopy(self.steps),
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


# --- What Python keeps of a trace ---------------------------------------------------------------


class Tables(nn.Module):
    """Make tables at the first call, as an attribute, in a dictionary and behind a cache."""

    def __init__(self):
        super().__init__()
        self.layer, self.table, self.tables = nn.Linear(3, 2), None, {}
        self.cached = functools.cache(lambda n: torch.arange(float(n))[:, None].sin())

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(len(x))[:, None].cos()
            self.table[0] = 7
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.ones(len(x), 2).tril()
        return self.layer(x) * self.tables[len(x)] + self.table + self.cached(len(x))


@pytest.mark.parametrize("compiled_again", [False, True])
def test_tables_made_at_the_first_call_have_their_values(compiled_again):
    model, x = Tables(), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    plain.cached = functools.cache(plain.cached.__wrapped__)
    if compiled_again:
        step = compile_training(model, torch.optim.SGD(model.parameters(), 0.0), EAGER, loss=0)
        step.compile(x)
    for call in (compile_inference(model, EAGER), model):
        result = call(x)
        assert type(result.detach()) is Tensor
        torch.testing.assert_close(result, plain(x))
    assert type(model.table) is type(model.tables[4]) is Tensor
    torch.testing.assert_close(copy.deepcopy(model.table), plain.table)


class Remembers(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.log, self.last = log, None

    def forward(self, x):
        h = x + 1
        self.log += [h, x]
        self.last = h
        return h


@pytest.mark.parametrize("compiling", [poptorch.inferenceModel, compile_inference])
def test_a_tensor_that_python_keeps_says_what_it_is(compiling):
    log: list[Tensor] = []
    model, x = Remembers(log), torch.ones(2)
    with pytest.warns(UserWarning, match=r"keeps a tensor in last[\s\S]*h = x \+ 1"):
        assert compiling(model)(x).tolist() == [2, 2]
    assert model.last is None
    assert "h = x + 1" in repr(log[0])
    for use in (lambda: log[0] + 1, lambda: log[0].tolist(), lambda: torch.stack(log)):
        with pytest.raises(CompileError, match=r"when the model was traced[\s\S]*from:"):
            use()


def test_a_failed_trace_leaves_none_either():
    log: list[Tensor] = []

    def model(x):
        log.append(x * 2)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        compile_inference(model, EAGER)(torch.ones(2))
    with pytest.raises(CompileError, match=r"x \* 2"):
        log[0].sum()


# --- Objects that hold tensors ------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: Tensor


@dataclasses.dataclass
class Registered:
    x: Tensor


torch.utils._pytree.register_dataclass(Registered)
KINDS = {
    "dataclass": Batch,
    "namespace": lambda x: types.SimpleNamespace(x=x),
    "nested": lambda x: types.SimpleNamespace(x=x, all=[{"x": x}]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_objects_with_tensors_are_refused_at_the_first_call(kind):
    make = KINDS[kind]
    with pytest.raises(InputError, match=r"batch is of class[\s\S]*register"):
        compile_inference(lambda batch: batch.x + 1, EAGER)(make(torch.ones(2)))
    with pytest.raises(CompileError, match=r"returns an object of class[\s\S]*register"):
        compile_inference(lambda x: make(x + 1), EAGER)(torch.ones(2))


def test_objects_next_to_returned_tensors_raise_where_they_are_used():
    result, batch = compile_inference(lambda x: (x + 1, Batch(x * 2)), EAGER)(torch.ones(2))
    assert result.tolist() == [2.0, 2.0]
    with pytest.raises(CompileError, match=r"no value: only what forward returns[\s\S]*x \* 2"):
        batch.x.sum()


def test_registered_objects_are_followed():
    compiled = compile_inference(lambda batch: Registered(batch.x + 1), EAGER)
    for value in (1.0, 2.0):
        assert compiled(Registered(torch.full((2,), value))).x.tolist() == [value + 1] * 2


class Mark(torch.Tensor):
    """A placeholder, as libraries of spiking networks make it."""

    @staticmethod
    def __new__(cls, *args, flag=False):
        return super().__new__(cls, *args)

    def __init__(self, *args, flag=False):
        self.flag = flag


class PlainMark(torch.Tensor):
    pass


def test_a_tensor_of_a_users_class_may_be_a_placeholder():
    class Net(nn.Module):
        def forward(self, x):
            state = Mark(flag=True), Mark([1.0, 2.0]), PlainMark([3.0])
            assert state[0].flag
            assert state[1].tolist() == [1, 2]
            assert type(state[2]) is PlainMark
            return x + len(state)

    before = vars(Mark)["__new__"]
    for door in (compile_inference, poptorch.inferenceModel):
        assert torch.equal(door(Net())(torch.ones(2)), torch.full((2,), 4.0))
    assert vars(Mark)["__new__"] is before
    assert "__new__" not in vars(PlainMark)
    assert torch.equal(PlainMark([1.0]) + 1, torch.tensor([2.0]))


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x + Mark([1.0, 2.0]),
        lambda x: x.as_subclass(Mark) + 1,
        lambda x: Mark(x) + 1,
        lambda x: torch.cat([x, PlainMark([1.0])]),
    ],
)
def test_operators_on_tensors_of_a_users_class_are_refused_with_their_line(forward):
    with pytest.raises(CompileError, match=r"a subclass of torch\.Tensor") as caught:
        compile_inference(forward)(torch.ones(2))
    assert "lambda x:" in str(caught.value)
    assert "Mark" in str(caught.value)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_tensors_are_tensors(copied):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.arange(2.0)

        def forward(self, x):
            y = copied(x)
            return y.add_(copied(self.table)), x + 0  # a shallow copy has the same memory

    net, x = Net(), torch.ones(2)
    results = compile_inference(net)(x.clone())
    assert all(map(torch.equal, results, net(x.clone())))
