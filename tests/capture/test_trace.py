"""Check what a trace holds: every tensor's role, every operator's line, and the Python once."""

import collections
import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import compile_inference
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.errors import CompileError
from ipu_dynamo.passes.traced.lift_constants import LiftConstants

aten = torch.ops.aten


def traced(model, *args, training=False, **kwargs):
    capture = trace(model, read_arguments(model, args, kwargs), training=training)
    LiftConstants()(capture)
    return capture


def targets(capture):
    return [node.target for node in capture.graph.graph.nodes if node.op == "call_function"]


def roles(capture, kind):
    return [role.name for role in capture.placeholders if role.kind == kind]


class Scale(nn.Module):
    """A parameter, a buffer that counts calls, and a number that changes in Python."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        self.count.add_(1)
        return x * self.weight * self.runs


# --- One run of the Python --------------------------------------------------------------------


def test_python_runs_once():
    model = Scale()
    capture = traced(model, torch.ones(2, 3), training=True)
    assert model.runs == 1
    assert torch.equal(
        capture.graph(torch.ones(3), torch.zeros(()), torch.ones(2, 3))[0][0], torch.ones(3)
    )


def test_trace_leaves_the_module_as_it_was():
    model = Scale()
    weight, count = model.weight, model.count
    traced(model, torch.ones(2, 3))
    assert model.weight is weight
    assert model.count is count
    assert count == 0


def test_failed_trace_leaves_the_module_as_it_was():
    class Fails(Scale):
        def forward(self, x):
            super().forward(x)
            raise KeyError("mine")

    model = Fails()
    weight = model.weight
    with pytest.raises(KeyError, match="mine"):
        traced(model, torch.ones(2, 3))
    assert model.weight is weight
    assert torch.autograd.Function.apply.__name__ == "apply"
    assert not torch.compiler.is_compiling()


def test_values_of_inputs_are_not_looked_at():
    capture = traced(lambda x: x + 1, torch.full((2,), float("nan")))
    assert torch.equal(capture.graph(torch.zeros(2))[0], torch.ones(2))


def test_libraries_see_that_they_are_compiled():
    seen = []
    traced(lambda x: seen.append(torch.compiler.is_compiling()) or x, torch.ones(1))
    assert seen == [True]


# --- Roles -------------------------------------------------------------------------------------


def test_every_tensor_has_a_role():
    model = Scale()
    model.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    capture = traced(model, torch.ones(2, 3), training=True)
    assert roles(capture, "parameter") == ["weight", "frozen"]
    assert [role.trainable for role in capture.placeholders[:2]] == [True, False]
    assert roles(capture, "buffer") == ["count"]
    assert roles(capture, "input") == ["x"]
    assert capture.report.tensors["weight"] is model.weight


def test_tied_parameters_are_one_placeholder_under_their_first_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    capture = traced(model, torch.ones(2, 3), training=True)
    assert roles(capture, "parameter") == ["0.weight", "0.bias", "1.bias"]


def test_inputs_are_named_after_arguments_and_paths():
    def model(a, *rest, scale, **more):
        return a["x"][0] + rest[1] * scale + more["z"]

    one = torch.ones(1)
    capture = traced(model, {"x": [one]}, one, one, scale=one, z=one)
    assert roles(capture, "input") == ["a['x'][0]", "rest[0]", "rest[1]", "scale", "z"]


def test_input_named_like_a_parameter_is_told_from_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.ones(2))

        def forward(self, x, random_key):
            return x * self.x + random_key

    capture = traced(Model(), torch.ones(2), torch.ones(2))
    assert [role.name for role in capture.placeholders] == ["x", "x'", "random_key"]


def test_tensors_from_outside_become_constants_with_one_warning_each():
    outside = torch.tensor([1.0, 2.0])
    with pytest.warns(UserWarning, match=r"neither an input, a parameter nor a buffer") as warned:
        capture = traced(lambda x: x * outside + outside, torch.ones(2))
    assert len(warned) == 1
    (name,) = roles(capture, "constant")
    assert torch.equal(capture.report.tensors[name], outside)
    outside.zero_()
    assert capture.report.tensors[name].tolist() == [1.0, 2.0]


def test_warning_names_a_plain_attribute():
    model = nn.Module()
    model.table = torch.ones(2)
    model.forward = lambda x: x * model.table
    with pytest.warns(UserWarning, match=r"the tensor table \(2,\)"):
        capture = traced(model, torch.ones(2))
    assert roles(capture, "constant") == ["table"]


def test_tensors_made_in_forward_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture = traced(lambda x: x + torch.tensor([1.0, 2.0]) + torch.zeros(2), torch.ones(2))
    assert len(roles(capture, "constant")) == 1


def test_changing_a_tensor_from_outside_is_refused():
    outside = torch.zeros(2)

    def model(x):
        outside.add_(1)
        return x + outside

    with (
        pytest.warns(UserWarning, match="neither an input"),
        pytest.raises(
            CompileError, match=r"in place[\s\S]*outside.add_\(1\)[\s\S]*register_buffer"
        ),
    ):
        compile_inference(model, {"engine": "eager"})(torch.ones(2))


# --- Structure of what is returned --------------------------------------------------------------


def test_structure_is_rebuilt_with_python_values_as_they_were():
    Pair = collections.namedtuple("Pair", "a b")
    thing = object()

    def model(x):
        return {
            "o": collections.OrderedDict(b=x, a=[None, 3, "s"]),
            "p": Pair(x + 1, (thing, x * 2)),
        }

    structure = traced(model, torch.ones(2)).report.structure
    result = structure.rebuild([torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)])
    assert list(result["o"]) == ["b", "a"]
    assert result["o"]["a"] == [None, 3, "s"]
    assert isinstance(result["p"], Pair)
    assert result["p"].b[0] is thing
    assert [result["o"]["b"], result["p"].a, result["p"].b[1]] == [0, 1, 2]


def test_model_without_result_returns_none():
    assert traced(lambda x: None, torch.ones(1)).report.structure.rebuild([]) is None


# --- Operators ----------------------------------------------------------------------------------


def test_high_level_operators_survive():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))

        def forward(self, x, y):
            return F.cross_entropy(self.layers(x), y)

    found = targets(
        traced(Model(), torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), training=True)
    )
    assert {aten.linear.default, aten.batch_norm.default, aten.dropout.default} <= set(found)
    assert aten.cross_entropy_loss.default in found


def test_every_operator_has_a_value_and_a_source_line():
    capture = traced(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.ones(2, 3))
    for node in capture.graph.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["val"], torch.Tensor)
            assert re.search(r'Module "[01]" of class (Linear|ReLU)', node.meta["stack_trace"])


def test_modes_of_the_model_are_in_the_graph():
    def model(x):
        with torch.no_grad():
            y = x * 2
        return x + y

    names = [
        getattr(t, "__name__", "") for t in targets(traced(model, torch.ones(1), training=True))
    ]
    assert names.count("_set_grad_enabled") == 2


# --- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: x + 1 if x.sum() > 0 else x,
        lambda x: x * x[0].item(),
        lambda x: x * len(x.tolist()),
        lambda x: x[x.nonzero()],
        lambda x: x * int(x[0]),
        lambda x: x * torch.from_numpy(x.numpy()),
    ],
    ids=["if", "item", "tolist", "nonzero", "int", "numpy"],
)
def test_python_that_depends_on_values_is_refused_with_its_line(decide):
    with pytest.raises(
        CompileError, match=r"depends on (the|its) value[\s\S]*test_trace.py:\d+ in <lambda>"
    ):
        traced(decide, torch.ones(3))


def test_reassigned_buffer_is_refused():
    class Model(Scale):
        def forward(self, x):
            self.count = self.count + 1
            return x

    model = Model()
    count = model.count
    with pytest.raises(
        CompileError, match=r"Buffer count is reassigned.*self\.count\.copy_\(src\)"
    ) as caught:
        traced(model, torch.ones(3))
    assert "in forward: self.count = self.count + 1" in str(caught.value)
    assert model.count is count


def test_removed_parameter_is_refused_and_put_back():
    class Model(Scale):
        def forward(self, x):
            del self.weight
            return x

    model = Model()
    with pytest.raises(CompileError, match="Parameter weight is removed"):
        traced(model, torch.ones(3))
    assert isinstance(model.weight, nn.Parameter)


@pytest.mark.parametrize("part", ["model", "function", "layer"])
def test_what_torch_compile_has_wrapped_is_refused_by_name(part):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    if part == "layer":
        model[0] = torch.compile(model[0], backend="eager")
    elif part == "function":
        model = torch.compile(lambda x: x + 1, backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    name = "0" if part == "layer" else "the model"
    with pytest.raises(CompileError, match=f"^{name} is compiled by torch.compile already"):
        compile_inference(model, {"engine": "eager"})(torch.ones(2, 3))


@pytest.mark.parametrize("training", [False, True])
def test_changes_of_a_model_made_under_inference_mode_are_refused(training):
    with torch.inference_mode():
        model = nn.BatchNorm1d(3)
    with pytest.raises(CompileError, match=r"the \w+ \w+ was made under torch.inference_mode\(\)"):
        traced(model, torch.ones(2, 3), training=training)
    traced(copy.deepcopy(model), torch.ones(2, 3), training=training)
    traced(model.eval(), torch.ones(2, 3))


def test_a_module_made_in_forward_may_set_attributes_before_its_init():
    class Made(nn.Module):
        def __init__(self):
            self.factor = 2.0
            super().__init__()

        def forward(self, x):
            return x * self.factor

    compiled = compile_inference(lambda x: Made()(x), options={"engine": "eager"})
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
