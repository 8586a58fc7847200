"""Check programs of TensorFlow against what TensorFlow computed, and its files against damage."""

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("google.protobuf")

from ipu_dynamo.saved_model import available_tag_sets, load
from ipu_dynamo.saved_model.tf_graphs.checksums import _slow_crc, masked_crc
from ipu_dynamo.saved_model.tf_graphs.constants import constant_tensor
from ipu_dynamo.saved_model.tf_graphs.features import PARSERS
from ipu_dynamo.saved_model.tf_graphs.flatten import PASSING, Flattening
from ipu_dynamo.saved_model.tf_graphs.graph_module import KNOWN, GraphModule
from ipu_dynamo.saved_model.tf_graphs.messages import parse_message
from ipu_dynamo.saved_model.tf_graphs.operators.table import names
from ipu_dynamo.saved_model.tf_graphs.variable_table import VariableTable
from ipu_dynamo.saved_model.tf_graphs.variables import Variables
from tests.saved_model.test_command import SERVE, refused, run  # noqa: F401  a fixture

FIXTURES = Path(__file__).parent / "fixtures"
RESULTS = sorted((p for p in FIXTURES.glob("*/*.npz") if "examples" not in str(p)), key=str)
CASES = np.load(FIXTURES / "op_cases.npz")
TOLERANCE = 1e-5  # of the largest value


def close(result, expected):
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    limit = TOLERANCE * max(np.abs(expected).max(initial=0), 1)
    np.testing.assert_allclose(result, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_programs_compute_what_tensorflow_does(path):
    tags, key = path.stem.split("-")
    stored = np.load(path)
    inputs = {n[3:]: torch.from_numpy(stored[n]) for n in stored.files if n.startswith("in/")}
    with load(path.parent, tags.split("+"))[key] as signature:
        results = signature(**inputs)
        for name in signature.outputs:
            close(results[name].numpy(), stored[f"out/{name}"])
        dynamic = [n for n, spec in signature.inputs.items() if spec.shape[:1] == (None,)]
        if dynamic:  # the same rows, in another number of them
            half = {n: torch.cat([value, value[:1]]) for n, value in inputs.items()}
            again = signature(**half)
            for name, spec in signature.outputs.items():
                rows = len(results[name])
                if spec.shape and rows == len(next(iter(inputs.values()))):
                    close(again[name][:rows].numpy(), stored[f"out/{name}"])


@pytest.mark.parametrize("index", range(int(CASES["count"])))
def test_operators_compute_what_tensorflow_does(index):
    graph = parse_message("Graph", CASES[f"{index}/graph"].tobytes(), "case")
    begin = f"{index}/in/"
    inputs = {n.removeprefix(begin): CASES[n] for n in CASES.files if n.startswith(begin)}
    flat = Flattening(graph, {f"{name}:0": name for name in inputs})
    wanted = sorted(n for n in CASES.files if n.startswith(f"{index}/out/"))
    outputs = [flat.result(f"case:{i}") for i in range(len(wanted))]
    feeds = [name for name in inputs if name in flat.inputs]
    module = GraphModule(flat.nodes, [flat.inputs[n] for n in feeds], outputs, Variables(Path()))
    results = module(*(torch.from_numpy(inputs[name]) for name in feeds))
    assert len(results) == len(wanted)
    for result, name in zip(results, wanted, strict=True):
        close(result.numpy(), CASES[name])


def test_every_operator_has_a_case():
    recorded = set()
    for index in range(int(CASES["count"])):
        graph = parse_message("Graph", CASES[f"{index}/graph"].tobytes(), "case")
        recorded |= {node.op for node in graph.node}
    assert sorted(set(names()) - recorded) == ["ResourceGather"]  # in the fixture `attention`
    assert len({*names(), *KNOWN, *PASSING, *PARSERS}) >= 120


def test_the_guide_lists_every_operator():
    text = (Path(__file__).parents[2] / "docs" / "saved_model.md").read_text(encoding="utf-8")
    listed = text.partition("<!-- operators -->")[2].partition("<!-- end of operators -->")[0]
    assert re.findall(r"`(\w+)`", listed) == names()


def test_names_are_those_of_the_graph():
    signature = load(FIXTURES / "mlp")["serving_default"]
    kinds = {group.name: group.kind.value for group in signature.groups()}
    assert kinds["dense/MatMul"] == kinds["dense/Relu"] == "op"
    assert kinds["kernel"] == kinds["bias"] == "param"
    assert kinds["x"] == "input"
    with load(FIXTURES / "tf1_bert")["serving_default"] as bert:
        found = [group.name for group in bert.groups()]
    assert {"layer_0/query/MatMul", "layer_0/query/kernel", "input_ids"} <= set(found)
    assert not [name for name in found if "Assert" in name or name.endswith("/read")]


def test_an_operator_that_gives_several_nodes_is_a_group():
    groups = load(FIXTURES / "tf1_bert")["serving_default"].groups()
    sizes = {group.name: len(group.nodes) for group in groups}
    assert len(sizes) == len(groups)
    assert sizes["one_hot"] > 2


def test_loops_are_refused_with_all_their_operators(run):  # noqa: F811
    result = run("show", "--dir", FIXTURES / "loop", *SERVE)
    refused(result, r"operators that are not supported: .*While")
    status, out, _ = run("show", "--dir", FIXTURES / "loop", "--tag_set", "serve", "--list_ops")
    assert status == 0
    assert "While (not supported)" in out
    assert "\nFill\n" in out


def test_the_command_runs_what_tensorflow_saved(run, tmp_path):  # noqa: F811
    stored = np.load(FIXTURES / "mlp" / "serve-serving_default.npz")
    np.save(tmp_path / "x.npy", stored["in/x"])
    arguments = ("--inputs", f"x={tmp_path}/x.npy", "--outdir", tmp_path)
    status, _, _ = run("run", "--dir", FIXTURES / "mlp", *SERVE, *arguments)
    assert status == 0
    close(np.load(tmp_path / "y.npy"), stored["out/y"])
    _, out, _ = run("show", "--dir", FIXTURES / "tf1_tag_sets", "--json")
    assert json.loads(out) == [["gpu", "serve"], ["serve"]]
    assert available_tag_sets(FIXTURES / "mlp") == [["serve"]]


def test_examples_are_features_of_the_program(run, tmp_path):  # noqa: F811
    folder = FIXTURES / "tf1_examples"
    expected = np.load(folder / "serve-serving_default.npz")["out/y"]
    text = 'inputs=[{"ids": [0, 1, 2, 3, 4, 8]}, {"ids": [5, 5, 5, 5, 5, 5]}]'
    arguments = ("run", "--dir", folder, *SERVE, "--outdir", tmp_path, "--overwrite")
    assert run(*arguments, "--input_examples", text)[0] == 0
    close(np.load(tmp_path / "y.npy"), expected)
    whole = text.replace("]}", '], "weight": [2]}')
    assert run(*arguments, "--input_examples", whole)[0] == 0
    close(np.load(tmp_path / "y.npy"), 4 * expected)  # the default is a half
    missing = 'inputs=[{"weight": [2.0]}]'
    refused(run(*arguments, "--input_examples", missing), "no value for input 'ids'")


def test_a_branch_whose_predicate_is_known_is_left_alone():
    names_ = [group.name for group in load(FIXTURES / "tf1_branches")["serving_default"].groups()]
    assert [n for n in names_ if "Tanh" in n]
    assert not [n for n in names_ if "Switch" in n or "Merge" in n or "mul" in n.lower().split("/")]


def test_sums_are_those_of_the_standard():
    assert _slow_crc(b"123456789") == 0xE3069283
    assert _slow_crc(bytes(32)) == 0x8A9136AA
    data = random.Random(0).randbytes(1000)
    masked = ((crc := _slow_crc(data)) >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF
    assert masked_crc(data) == masked


def read_all(folder):
    """All values of a folder's variables."""
    table = VariableTable(folder / "variables" / "variables")
    graph = table.object_graph()
    keys = [key for key in table.names if not key.startswith("_")]
    return [table.tensor(key) for key in keys], graph


@pytest.mark.parametrize("model", ["mlp", "tf1_variables"])
@pytest.mark.parametrize("name", ["variables.index", "variables.data-00000-of-00001"])
def test_damaged_variables_are_refused_or_the_same(tmp_path, model, name):
    shutil.copytree(FIXTURES / model, tmp_path / "m")
    path = tmp_path / "m" / "variables" / name
    content = path.read_bytes()
    expected, _ = read_all(tmp_path / "m")
    draw = random.Random(model + name)
    refusals = 0
    for _ in range(100):
        changed = bytearray(content)
        if draw.random() < 0.2:
            changed = changed[: draw.randrange(len(changed))]
        else:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            found, _ = read_all(tmp_path / "m")
        except (ValueError, NotImplementedError) as error:
            refusals += str(path.parent) in str(error)
            continue
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert refusals > 50


@pytest.mark.parametrize("model", ["mlp", "tf1_frozen"])
def test_damaged_graphs_are_refused_or_run(tmp_path, model):
    shutil.copytree(FIXTURES / model, tmp_path / "m")
    path = tmp_path / "m" / "saved_model.pb"
    content, draw = path.read_bytes(), random.Random(model)
    for _ in range(20):
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            signatures = load(tmp_path / "m")
        except (ValueError, NotImplementedError, RuntimeError):
            continue
        assert isinstance(signatures, dict)


def test_a_graph_that_calls_itself_is_refused():
    graph = parse_message("Graph", b"", "none")
    call = graph.node.add(name="call", op="PartitionedCall")
    call.attr.add(key="f").value.func.name = "f"
    function = graph.library.function.add()
    function.signature.name = "f"
    function.signature.output_arg.add(name="y")
    inner = function.node_def.add(name="again", op="PartitionedCall")
    inner.attr.add(key="f").value.func.name = "f"
    function.ret.add(key="y", value="again:output:0")
    with pytest.raises(ValueError, match="calls itself"):
        Flattening(graph, {}).result("call:0")
    loop = graph.node.add(name="a", op="Neg")
    loop.input.append("a")
    with pytest.raises(ValueError, match="depends on itself"):
        Flattening(graph, {}).result("a:0")


def call(nodes, name, function, *inputs):
    nodes.add(name=name, op="PartitionedCall", input=inputs).attr.add(
        key="f"
    ).value.func.name = function


ENDLESS = {
    "i:0": [("i", "Identity", "j"), ("j", "Identity", "i")],
    "c:0": [],  # a call of what returns its argument, fed by its own result
    "s:1": [("s", "Switch", "x", "n"), ("n", "LogicalNot", "n")],
    "s:0": [("s", "Switch", "x", "s")],
}
TOO_FEW = {
    "i:0": [("i", "Identity")],
    "s:0": [("s", "Switch", "x")],
    "s:1": [("s", "Switch", "x", "n"), ("n", "LogicalNot")],
    "t2999:1": [(f"t{i}", "Switch", "x", f"t{i - 1}:1" if i else "x") for i in range(3000)],
}


@pytest.mark.parametrize(
    ("tensor", "nodes", "problem"),
    [(*item, "depends on itself") for item in ENDLESS.items()]
    + [(*item, "has no input|more than 100 deep") for item in TOO_FEW.items()],
)
def test_graphs_that_never_begin_are_refused(tensor, nodes, problem):
    graph = parse_message("Graph", b"", "none")
    graph.node.add(name="x", op="Placeholder")
    function = graph.library.function.add()
    function.signature.name = "same"
    function.signature.input_arg.add(name="a")
    function.signature.output_arg.add(name="y")
    function.ret.add(key="y", value="a")
    call(graph.node, "c", "same", "c")
    for name, op, *inputs in nodes:
        graph.node.add(name=name, op=op, input=inputs)
    with pytest.raises(ValueError, match=problem):
        Flattening(graph, {"x:0": "x"}).result(tensor)


def test_functions_that_double_have_a_bound(monkeypatch):
    monkeypatch.setattr("ipu_dynamo.saved_model.tf_graphs.flatten.MOST_NODES", 1000)
    graph = parse_message("Graph", b"", "none")
    graph.node.add(name="x", op="Placeholder")
    call(graph.node, "c", "f0", "x")
    for level in range(12):
        function = graph.library.function.add()
        function.signature.name = f"f{level}"
        function.signature.input_arg.add(name="a")
        function.signature.output_arg.add(name="y")
        for name in ("p", "q") if level < 11 else ():
            call(function.node_def, name, f"f{level + 1}", "a")
        inputs = ["p:output:0", "q:output:0"] if level < 11 else ["a", "a"]
        function.node_def.add(name="s", op="AddV2", input=inputs)
        function.ret.add(key="y", value="s:z:0")
    with pytest.raises(ValueError, match="more than 1000 nodes"):
        Flattening(graph, {"x:0": "x"}).result("c:0")


def test_deep_graphs_need_no_stack():
    graph = parse_message("Graph", b"", "none")
    graph.node.add(name="n0", op="Placeholder")
    for index in range(1, 5000):
        graph.node.add(name=f"n{index}", op="Neg").input.append(f"n{index - 1}")
    flat = Flattening(graph, {"n0:0": "x"})
    node, _ = flat.result("n4999:0")
    assert len(flat.nodes) == 5000
    assert node.name == "n4999"


def test_fixtures_are_small():
    assert all(
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 300_000
        for path in FIXTURES.iterdir()
    )


def test_few_bytes_of_a_file_make_no_large_constant():
    tensor = parse_message("Graph", b"", "none").node.add().attr.add().value.tensor
    tensor.dtype = 1  # float32
    tensor.shape.dim.add().size = 1 << 28
    tensor.float_val.append(2.5)
    constant = constant_tensor(tensor, "c")
    assert constant.shape == (1 << 28,)
    assert constant[-1] == 2.5
    assert constant.untyped_storage().nbytes() == 4
    tensor.float_val.append(1.5)
    with pytest.raises(ValueError, match="c: damaged: 2 values for 268435456 elements"):
        constant_tensor(tensor, "c")


def test_operators_on_strings_are_refused_where_an_output_needs_them(tmp_path):
    shutil.copytree(FIXTURES / "mlp", tmp_path / "m")
    path = tmp_path / "m" / "saved_model.pb"
    program = parse_message("SavedModel", path.read_bytes(), str(path))
    meta = program.meta_graphs[0]
    output = next(s for s in meta.signatures if s.key == "serving_default").value.outputs[0]
    meta.graph.node.add(name="as_text", op="AsString", input=[output.value.name])
    path.write_bytes(program.SerializeToString())
    assert load(tmp_path / "m")  # no output needs it
    meta.graph.node.add(name="back", op="StringToNumber", input=["as_text:0"])
    output.value.name = "back:0"
    path.write_bytes(program.SerializeToString())
    named = r"not supported: AsString \('as_text'\), StringToNumber \('back'\)"
    with pytest.raises(NotImplementedError, match=named):
        load(tmp_path / "m")
