"""Check groups of convolutions: their marks, their order, their partial sums, what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import Block, ConvolutionGroup, Options, compile_inference, compile_training
from ipu_dynamo.errors import CompileError, OptionError
from ipu_dynamo.ops.marks.markers import identity_loss
from ipu_dynamo.passes.traced.tag_convolution_groups import EmptyGroup, NestedGroups
from ipu_dynamo.program import GROUP, Program
from ipu_dynamo.torch_compile.backend import ipu
from tests.properties.evaluate import captured, check, evaluate, lines_of, named_inputs


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


class Branches(nn.Module):
    """Two convolutions, neither of which reads the other, with other operators between them."""

    def __init__(self, group=None, *, transposed=False, dtype=torch.float32):
        super().__init__()
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.a, self.b = kind(3, 3, 3, padding=1), kind(3, 3, 3, padding=1, bias=False)
        self.group = ConvolutionGroup() if group is None else group
        self.to(dtype)

    def forward(self, x):
        with self.group:
            left = self.a(x).relu()
            right = self.b(x.abs() + 1)
        return left - right, identity_loss((left * right).sum(), "sum")


def batch(dtype=torch.float32):
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def grouped(program):
    """Targets and places of the grouped operators of a program, in order."""
    return [
        (node.target._opname, node.meta[GROUP])
        for function in program.functions
        for node in function.operators
        if GROUP in node.meta
    ]


@pytest.mark.examples(8)
@given(transposed=st.booleans(), training=st.booleans())
def test_keeps_values_metadata_and_graph(transposed, training):
    model, x = Branches(transposed=transposed), batch()
    capture, one = captured(
        model, (x,), Options(), training=training, before="ScheduleConvolutionGroups"
    )
    inputs, nodes = named_inputs(model, (x,)), set(capture.graph.graph.nodes)
    before, lines = evaluate(capture, inputs), lines_of(capture.graph.graph.nodes)
    assert one(capture)
    check(capture)
    assert set(capture.graph.graph.nodes) == nodes
    after = evaluate(capture, inputs)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert lines_of(capture.graph.graph.nodes) == lines


@pytest.mark.parametrize("training", [False, True])
def test_members_stand_side_by_side_and_are_named(training):
    model = Branches(ConvolutionGroup("serial"))
    if training:
        run = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        run = compile_inference(model)
    run(batch())
    places = grouped(run.program)
    assert places[:2] == [("convolution", "serial 1/2"), ("convolution", "serial 2/2")]
    if training:
        backward = {place for target, place in places if target == "convolution_backward"}
        assert backward == {"serial 1/2", "serial 2/2"}
    (forward, *_) = run.program.functions
    members = [index for index, node in enumerate(forward.operators) if GROUP in node.meta]
    assert members[1] == members[0] + 1
    text = str(run.program) if training else forward.listing()
    assert training or "group, serial 2/2: test_schedule_convolution_groups.py" in text
    read = Program.parse(run.program.text())
    assert read == run.program
    assert grouped(read) == places


@pytest.mark.few(8)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("partials", [("half", "float"), ("float", "half"), ("half",), ()])
@pytest.mark.parametrize("default", ["float", "half"])
def test_each_convolution_has_its_own_partials(partials, default, transposed):
    model = Branches(ConvolutionGroup(partials=partials), transposed=transposed, dtype=torch.half)
    options = Options(convolution_partials=default, partials_chunk=16)
    run = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.0), options=options)
    run(batch(torch.half))
    names = [target for target, _ in grouped(run.program)]
    each = list(partials) * 2 if len(partials) == 1 else list(partials) or [default] * 2
    halves = each.count("half")
    kinds = [name for name in names if name.startswith("half_partials")]
    # one forward product and the gradient of one weight, for each convolution; x needs no gradient
    assert len(kinds) == 2 * halves, names
    assert names.count("convolution") == 2 - halves
    assert {place for _, place in grouped(run.program)} == {"parallel 1/2", "parallel 2/2"}


def test_half_partials_of_one_convolution_give_its_values_only():
    x = batch(torch.half)
    torch.manual_seed(0)
    model = Branches(ConvolutionGroup(partials=["half", "float"]), dtype=torch.half)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            with model.group:
                left, right = model.a(x), model.b(x)
            return left, right

    def outputs(partials, default):
        model.group = ConvolutionGroup(partials=partials)
        options = Options(convolution_partials=default, partials_chunk=16)
        return compile_inference(Both(), options=options)(x)

    mixed = outputs(["half", "float"], "float")
    halves, floats = outputs([], "half"), outputs([], "float")
    assert torch.equal(mixed[0], halves[0])
    assert not torch.equal(mixed[0], floats[0])
    assert torch.equal(mixed[1], floats[1])
    assert not torch.equal(mixed[1], halves[1])


def test_two_groups_and_one_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Branches(), Branches(ConvolutionGroup("serial"))

        def forward(self, x):
            return self.two(self.two(self.one(x)[0])[0])

    run = compile_inference(Twice())
    x, model = batch(), run
    places = [place for _, place in grouped_after(model, x)]
    assert places == ["parallel 1/2", "parallel 2/2"] + ["serial 1/2", "serial 2/2"] * 2


def grouped_after(run, x):
    run(x)
    return grouped(run.program)


def test_outside_a_program_it_does_nothing():
    model, x = Branches(), batch()

    def forward(x):
        with ConvolutionGroup():
            return model.a(x), model.b(x)

    bare = model.a(x), model.b(x)
    through = torch.compile(forward, backend=ipu, fullgraph=True)
    for one in (forward, through):
        for ours, plain in zip(one(x), bare, strict=True):
            assert torch.equal(ours, plain)


def refused(forward, error=CompileError):
    class Model(Branches):
        def forward(self, x):
            return forward(self, x)

    with pytest.raises(error) as caught:
        compile_inference(Model())(batch())
    assert "test_schedule_convolution_groups.py" in str(caught.value)
    return str(caught.value)


def test_refuses_groups_in_groups():
    def forward(model, x):
        with ConvolutionGroup(), ConvolutionGroup():
            return model.a(x)

    assert "begins inside another one" in refused(forward, NestedGroups)


def test_refuses_a_group_without_convolutions():
    def forward(model, x):
        with ConvolutionGroup():
            return x * 2

    assert "has none" in refused(forward, EmptyGroup)


def test_refuses_convolutions_that_depend_on_each_other():
    def forward(model, x):
        with ConvolutionGroup():
            return model.b(model.a(x).relu())

    assert "reads the result of another one of its group" in refused(forward)


def test_finds_dependence_through_a_change_in_place():
    def forward(model, x):
        y = x.clone()
        with ConvolutionGroup():
            y.add_(model.a(x))
            return model.b(y)

    assert "reads the result of another one of its group" in refused(forward)


def test_refuses_a_group_on_two_stages():
    def forward(model, x):
        with ConvolutionGroup():
            with Block("a", 0):
                left = model.a(x)
            with Block("b", 1):
                return left + model.b(x)

    assert "convolutions on the stages 0" in refused(forward)


def test_refuses_settings_for_another_number_of_convolutions():
    def forward(model, x):
        with ConvolutionGroup(partials=["half", "half", "float"]):
            return model.a(x) + model.b(x)

    assert "settings for 3 convolutions, and has 2" in refused(forward)


@pytest.mark.parametrize(
    "settings",
    [
        {"plan": "other"},
        {"partials": "double"},
        {"partials": ["half"] * 2, "count": 3},
        {"partials": ["half"] * 2, "memory_proportion": [0.5] * 3},
        {"memory_proportion": [0.5, True]},
        {"memory_proportion": 1.1},
    ],
)
def test_refuses_what_a_group_cannot_have(settings):
    with pytest.raises(OptionError):
        ConvolutionGroup(**settings)
