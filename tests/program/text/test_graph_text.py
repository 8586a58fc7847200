"""Check that graphs read back from their lines, and what in a graph cannot be written."""

import operator
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode

from ipu_dynamo.errors import source_line
from ipu_dynamo.ops import operators
from ipu_dynamo.ops.operators import check_arguments, operator_name, operator_named
from ipu_dynamo.program.ir.function import structural_key
from ipu_dynamo.program.ir.types import DTYPES, TensorType
from ipu_dynamo.program.text.graph_text import read_graph, write_graph
from ipu_dynamo.program.text.indented import outline
from ipu_dynamo.testing import aten_graphs
from tests.program.text.test_literals import odd_strings

aten = torch.ops.aten


def read(text):
    return read_graph(outline(text.strip()))


def lines_of(graph):
    return "\n".join(write_graph(graph))


@given(case=aten_graphs())
def test_drawn_graphs_read_back(case):
    graph, inputs = case[:2]
    parsed = read(lines_of(graph))
    assert lines_of(parsed) == lines_of(graph)
    assert structural_key(parsed) == structural_key(graph)
    expected, found = graph(*inputs), parsed(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@given(value=st.floats() | st.complex_numbers(), text=odd_strings | st.text())
def test_arguments_of_any_kind_read_back(value, text):
    with FakeTensorMode():
        graph, tensor = fx.Graph(), torch.empty(2, 3)
        x = graph.placeholder("x")
        x.meta["val"] = tensor
        nodes = [
            graph.call_function(aten.add.Tensor, (x, value), {"alpha": True}),
            graph.call_function(aten.gelu.default, (x,), {"approximate": text}),
            graph.call_function(aten.index.Tensor, (x, [None, x])),
            graph.call_function(aten.clone.default, (x,), {"memory_format": torch.channels_last}),
            graph.call_function(
                aten.full.default,
                ([2, -3], float("-inf")),
                {"device": torch.device("cpu"), "layout": torch.strided, "dtype": torch.half},
            ),
        ]
        for node in nodes:
            node.meta["val"] = tensor
        graph.output((*nodes, None)).meta["val"] = None
    module = fx.GraphModule(torch.nn.Module(), graph)
    parsed = read(lines_of(module))
    assert lines_of(parsed) == lines_of(module)
    assert structural_key(parsed) == structural_key(module)


def graph_of(source="", recomputed=False, value=None, target=aten.neg.default, args=(), **kwargs):
    """A graph of one call, of which single things can differ."""
    with FakeTensorMode():
        graph = fx.Graph()
        nodes = [graph.placeholder(name) for name in "xy"]
        for node in nodes:
            node.meta["val"] = torch.empty(2, 3)
        made = graph.call_function(target, args or (nodes[0],), kwargs)
        made.meta["val"] = torch.empty(2, 3) if value is None else value()
        made.meta["stack_trace"] = source
        if recomputed:
            made.meta["ipu.recomputed"] = True
        graph.output((made,)).meta["val"] = None
    return fx.GraphModule(torch.nn.Module(), graph)


def test_whatever_decides_the_result_is_in_the_key_and_in_the_text():
    graphs = [
        graph_of(),
        graph_of(recomputed=True),
        graph_of(value=lambda: torch.empty(3, 2).t()),
        graph_of(value=lambda: torch.empty(2, 3, dtype=torch.half)),
        graph_of(value=lambda: torch.empty(2, 3, device="meta")),
        graph_of(value=lambda: torch.empty(2, 3, device="cuda:0")),
        graph_of(value=lambda: torch.empty(2, 3, device="cuda:1")),
        graph_of(target=aten.abs.default),
    ]
    assert len({structural_key(graph) for graph in graphs}) == len(graphs)
    assert len({lines_of(graph) for graph in graphs}) == len(graphs)
    for graph in graphs:
        assert structural_key(read(lines_of(graph))) == structural_key(graph)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", "cuda:1", "meta"])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_any_type_and_device_are_read_or_refused(dtype, device):
    text = f"%x: {TensorType(DTYPES[dtype], (2, 3))}@{device} = placeholder\nreturn (%x,)"
    text = text.replace("@cpu", "")
    if dtype.startswith(("qint", "quint")):
        with pytest.raises(ValueError, match=r"^line 1: quantized"):
            read(text)
    else:
        assert lines_of(read(text)) == text


@pytest.mark.parametrize(
    "source",
    [
        "model.py:12 in forward: return x @ self.w",
        "my model.py:1 in <lambda>: é = '\u2028'  # \"quoted\" \\n",
        "a:1 in b: c.py:2 in d: e",
        "unknown source",
    ],
)
def test_source_lines_stay_and_do_not_count(source):
    file, _, rest = source.partition(":")
    number, _, rest = rest.partition(" in ")
    function, _, text = rest.partition(": ")
    trace = f'  File "/project/{file}", line {number}, in {function}\n    {text}\n'
    graph = graph_of(trace if rest else "")
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.neg.default)
    assert source_line(node) == source
    (found,) = read(lines_of(graph)).graph.find_nodes(op="call_function", target=aten.neg.default)
    assert source_line(found) == source
    assert structural_key(graph) == structural_key(graph_of())


def test_what_has_no_text_is_named_with_its_line():
    trace = '  File "model.py", line 3, in forward\n    y = f(x)\n'
    for graph in (
        graph_of(trace, target=torch.neg),
        graph_of(trace, target=torch.ops.higher_order.cond),
        graph_of(trace, args=(...,)),
        graph_of(trace, value=lambda: torch.empty(2, 3).to_sparse()),
    ):
        with pytest.raises(ValueError, match=r"(?s)^%\w+: .*from: model.py:3 in forward: y = f"):
            write_graph(graph)
        assert structural_key(graph) == structural_key(graph)  # such a function still has a key


GOOD = """\
%x: f32[2] = placeholder
%y: f32[2] = aten.add.Tensor(%x, 1.0, alpha=2)  {"ipu.recomputed": True}  # "m.py:1 in f: x"
%z: (f32[1], f32[1]) = aten.split.Tensor(%y, 1)
%w: f32[1] = getitem(%z, 1)
return (%w, None)"""


def test_graph_in_words():
    graph = read(GOOD)
    assert lines_of(graph) == GOOD
    assert graph(torch.tensor([1.0, 2.0]))[0].tolist() == [4.0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("add.Tensor", "add", "no operator aten.add is registered"),
        (
            "aten.add.Tensor",
            "aten.from_file.default",
            "aten.from_file.default reads or makes files",
        ),
        ("aten.add.Tensor", "nothere.add.Tensor", "import the module that defines it"),
        ("aten.add.Tensor", "eval", "no operator eval"),
        ("alpha=2", "beta=2", "aten.add.Tensor has no argument beta left"),
        ("alpha=2", "self=2", "aten.add.Tensor has no argument self left"),
        (", 1.0, alpha=2", "", "aten.add.Tensor needs other"),
        ("1.0, ", "1.0, 2.0, 3.0, ", "takes 2 arguments without a name, not 4"),
        ("getitem(%z, 1)", "getitem(%z)", "getitem takes a node and an index"),
        ("getitem(%z, 1)", "getitem(2, 1)", "getitem takes a node and an index"),
        ("%w: f32[1]", "%self: f32[1]", "%self is not free as a name"),
        ("%w: f32[1]", "%print: f32[1]", "%print is not free as a name"),
        ("%w: f32[1]", "%y: f32[1]", "%y is not free as a name"),
        ("1.0", "Add(x=1)", "an operator takes no dataclass"),
        ("1.0", "[f32[2]]", "an operator takes no dataclass"),
        ("ipu.recomputed", "ipu.other", "a node may be marked as ipu.recomputed"),
        ("(f32[1], f32[1])", '"f32"', "no operator results in"),
        ("%x: f32[2]", "%x: None", "a placeholder is a tensor"),
        ("m.py:1 in f: x", "m.py", "not a source line"),
        ("(%w, None)", "%w", "a function returns a tuple of tensors and None"),
        ("(%w, None)", "(%z,)", "a function returns a tuple of tensors and None"),
        ("return (%w, None)", "", "expected return and found"),
        ("%y: f32[2] =", "  %y: f32[2] =", "nothing may stand below a node"),
    ],
)
def test_other_graphs_are_refused(old, new, message):
    assert old in GOOD
    with pytest.raises(ValueError, match=r"^line \d: ") as error:
        read(GOOD.replace(old, new, 1))
    assert message in str(error.value)


def test_operators_have_names():
    for target in (aten.add.Tensor, aten.t.default, operator.getitem):
        assert operator_named(operator_name(target)) is target
    check_arguments(aten.add.Tensor, (1, 2), {"alpha": 3})
    with pytest.raises(ValueError, match="is no operator that programs name"):
        operator_name(torch.add)
    for name in (
        "",
        ".",
        "..",
        "aten",
        "aten.",
        "aten.t.",
        "aten.t.default.x",
        "aten.save.default",
    ):
        with pytest.raises(ValueError, match="no operator"):
            operator_named(name)


@pytest.mark.slow
def test_modules_that_register_operators_are_imported_with_them():
    folder = Path(operators.__file__).parent
    registering = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "library.Library(" in path.read_text()
    }
    assert registering >= {"precision.float_check", "marks.markers"}
    loads = "import sys, ipu_dynamo.ops.operators; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", loads], capture_output=True, text=True, check=True
    )
    assert {f"ipu_dynamo.ops.{name}" for name in registering} <= {*loaded.stdout.split()}
