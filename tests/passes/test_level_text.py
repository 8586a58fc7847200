"""Check that models at every level read back from their text, and which texts are refused."""

from itertools import dropwhile, takewhile

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import fx, nn

import ipu_dynamo
from ipu_dynamo.ops.marks.markers import autograd_function_op
from ipu_dynamo.options import Options
from ipu_dynamo.passes.level_text import parse_level, write_level
from ipu_dynamo.passes.pipeline import joint_passes, traced_passes, whole_step
from ipu_dynamo.testing import assert_same_bits, recipes
from tests.properties.evaluate import captured, left_by, named_inputs
from tests.properties.running import draw_placed

GRAPHS = [
    step.name for step in (*traced_passes(Options(), training=True), *joint_passes(Options()))
]


def read_back(model):
    """What the text of a model is read as; it has the same text."""
    text = write_level(model)
    parsed = parse_level(text)
    assert write_level(parsed) == text
    return parsed


@given(recipe=recipes(), training=st.booleans(), data=st.data())
def test_drawn_graphs_read_back_and_compute_the_same_bits(recipe, training, data):
    model, options = draw_placed(data, recipe, training=training)
    batch = recipe.data(1)
    inputs = named_inputs(model, batch)
    before = data.draw(st.sampled_from(GRAPHS))
    capture, _ = captured(model, batch, options, training=training, before=before)
    note(write_level(capture))
    if any(node.target is autograd_function_op for node in capture.graph.graph.nodes):
        with pytest.raises(ValueError, match=r"Twice\.apply is a Python object"):
            parse_level(write_level(capture))
        return
    parsed = read_back(capture)
    parsed.graph.graph.lint()
    assert_same_bits(run(parsed, capture, inputs), run(capture, capture, inputs))


def run(graph, capture, inputs):
    """What a graph gives for copies of a capture's tensors, and what these are afterwards."""
    held = {**capture.report.tensors, **inputs}
    tensors = []
    for node, role in graph.roles().items():
        value = node.meta["val"]
        tensor = held.get(role.name, torch.ones((), dtype=value.dtype).expand(value.shape))
        tensors.append(tensor.detach().contiguous().clone().to(value.dtype))
    torch.manual_seed(0)
    results = fx.Interpreter(graph.graph).run(*tensors, enable_io_processing=False)
    return [result for result in (*results, *tensors) if result is not None]


class Everything(nn.Module):
    """A loop, a hook, a constant, a buffer that changes, an attribute, autocast."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = torch.tensor([0.5, 2.0, 1.0])

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.fc(x).float()
        h.register_hook(lambda gradient: gradient * 2)
        with torch.no_grad():
            shift = h.mean()
        h = ipu_dynamo.for_loop(2, lambda y: y * self.scale, [h - shift])[0]
        h = ipu_dynamo.cond(h.sum() > 0, torch.relu, [h], torch.neg, [h])[0]
        return ipu_dynamo.identity_loss(self.norm(h), "mean")


@pytest.mark.parametrize("before", ["NameValues", "Differentiate", "AssignGradientStages"])
def test_passes_make_the_same_of_what_was_read(before):
    capture, _ = captured(Everything(), [torch.randn(4, 3)], before=before)
    parsed = read_back(capture)
    steps = dropwhile(lambda step: step.name != before, whole_step(Options(), training=True))
    for step in takewhile(lambda step: step.name != "Partition", steps):
        parsed, capture = left_by(step, parsed), left_by(step, capture)
        assert write_level(parsed) == write_level(capture), step.name
    assert "ipu.loop" in write_level(capture)
    assert "ipu.branch" in write_level(capture)


class Shared(nn.Module):
    """Two buffers in one memory, two constants in another one, and a constant of the user's."""

    def __init__(self):
        super().__init__()
        memory = torch.arange(6.0)
        self.register_buffer("first", memory[:4])
        self.register_buffer("last", memory[2:])
        integers = torch.arange(6)
        self.register_buffer("left", integers[:4])
        self.register_buffer("right", integers[2:])
        self.constant = torch.tensor([1.5, -0.0, float("inf"), 2.0], dtype=torch.float64)

    def forward(self, x):
        return x * self.first + self.last + self.constant + self.left * self.right


@pytest.mark.parametrize("before", ["LiftConstants", None])
def test_constants_keep_their_bits_and_tensors_their_common_memory(before):
    model = Shared()
    options = Options(narrow=True)  # integers that do not change become constants
    capture, _ = captured(model, [torch.ones(4)], options, training=False, before=before)
    parsed = read_back(capture)
    first, last = parsed.report.tensors["first"], parsed.report.tensors["last"]
    assert first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr() != 0
    assert (first.storage_offset(), last.storage_offset()) == (0, 2)
    if before is None:
        constants = [parsed.report.tensors[name] for name in ("constant", "left", "right")]
    else:
        constants = [parsed.graph._tensor_constant0]
    assert_same_bits(constants, [model.constant, model.left, model.right][: len(constants)])


def test_values_of_large_constants_are_left_out():
    large = torch.ones(1 << 15)
    capture, _ = captured(lambda x: x + large, [torch.ones(1)], training=False)
    with pytest.raises(ValueError, match=r"^line \d+: the values of _tensor_constant0"):
        parse_level(write_level(capture))


def text_before(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    capture, _ = captured(model, [torch.ones(2, 3)], training=False, before=name)
    return write_level(capture)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ipu_dynamo joint, form 1", "ipu_dynamo joint, form 2", "line 1: expected one of"),
        ("joint, form 1", "split, form 1", "line 1: level split is only listed"),
        ("JointGraph(", "TracedGraph(", "TracedGraph cannot stand here; JointGraph can"),
        ("JointGraph(", "JointGraph(level=1, ", "JointGraph has no field level"),
        ('"ipu.stage": 0', '"ipu.stage": True', "ipu.stage is True, which is not int"),
        ('"ipu.stage": 0', '"ipu.other": 0', "no pass reads a mark ipu.other"),
        ("aten.relu.default", "torch.relu", "no operator torch.relu is registered here"),
        ("aten.relu.default(", 'aten.relu.default(opaque("f"), ', "f is a Python object"),
        ('kind="parameter"', 'kind="weight"', 'kind is "weight"'),
        ('node="relu"', 'node="addmm"', "it returns relu"),
        ('GraphInput(node="arg0_1"', 'GraphInput(node="x"', "its inputs are arg0_1"),
        ("  outputs", "  results", "JointGraph has no part results"),
        ("return (%relu,)", "return (%relu, 3.0)", "a function returns a tuple"),
        (
            'kind="parameter"',
            'kind="buffer", memory=(0, 8, 0)',
            "no memory has 8 bytes and a tensor at 0",
        ),
        (
            'kind="parameter"',
            'kind="buffer", memory=(0, 16, 2)',
            "0.weight does not fit in 16 bytes",
        ),
        (
            'kind="parameter"',
            f'kind="buffer", memory=(0, {1 << 60}, 0)',
            f"this machine has no memory for u8[{1 << 60}]",
        ),
        (
            'kind="parameter"',
            'kind="constant", memory=(0, 64, 0)',
            "0.weight is a constant, which shares no memory",
        ),
        ('kind="parameter"', 'kind="constant", values="AAAA"', "has values of 3 bytes"),
        ("\nend", "\nend\nend", "expected one joint, 'end', and nothing more"),
    ],
)
def test_other_texts_are_refused_with_their_line(old, new, message):
    text = text_before("Partition")
    assert old in text
    with pytest.raises(ValueError, match=r"^line \d+: ") as error:
        parse_level(text.replace(old, new, 1))
    assert message in str(error.value)


def test_new_nodes_get_the_names_that_the_graph_would_have_given():
    capture, _ = captured(Everything(), [torch.randn(4, 3)], before="Partition")
    graph = capture.graph.graph
    for node in list(graph.nodes)[-3:-1]:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
    capture.set_returned([], [])
    made = [
        [model.graph.graph.create_node("placeholder", name).name for name in NAMES_TO_GIVE]
        for model in (read_back(capture), capture)
    ]
    assert made[0] == made[1]


NAMES_TO_GIVE = ["add", "mul", "t", "detach_2", "getitem", "view_1", "other"]
