"""Check stages of programs whose nodes share parameters and constants."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from ipu_dynamo.saved_model import convert, save
from ipu_dynamo.saved_model.conversion.drafts import copied_constants
from ipu_dynamo.saved_model.conversion.pipelines.tied_nodes import Block, join
from ipu_dynamo.saved_model.conversion.pipelines.work_list import WorkNode, memory_of
from tests.saved_model.converting import converted, embedded

FIXTURES = Path(__file__).parent / "fixtures"
AUTO = {"converter": "auto"}
ROWS = {0: Dim("rows", min=1, max=64)}


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.chdir(tmp_path)


def stages(out="out"):
    """The stage of each node, as `auto` or a file has decided."""
    return json.loads(Path(out, "cache/application.json").read_text())["pipeline"]


def assert_runs_like(signature, model, x):
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(signature(x=x)["output_0"], expected, rtol=0, atol=1e-5)


def assert_load_takes_it(source, model, x):
    """The solution that `auto` has written is one for `load`, and gives the same executable."""
    (path,) = Path("solution").iterdir()
    num_ipus = len(json.loads(path.read_text())["device_mapping"])
    config = {"converter": "load", "solution_path": str(path)}
    options = embedded(num_ipus=num_ipus, pipeline_cfg=config)
    assert_runs_like(converted(source, Path("loaded"), **options), model, x)
    first, second = (Path(n, "cache/application.ipu_exec").read_bytes() for n in ("out", "loaded"))
    assert first == second


class Chain(nn.Module):
    """Layers in a row; those with one number are one."""

    def __init__(self, order, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(max(order) + 1))
        self.order = order

    def forward(self, x):
        for number in self.order:
            x = torch.tanh(self.layers[number](x))
        return x


def saved(model, x, name="p"):
    save(name, {"serving_default": (model.eval(), (x,), (ROWS,))})
    return name


@pytest.mark.parametrize("precision", [None, "FP16"])
def test_nodes_that_share_a_parameter_are_in_one_stage(precision):
    torch.manual_seed(0)
    model, x = Chain([0, 1, 2, 2, 3, 4]), torch.randn(5, 8)
    source = saved(model, x)
    options = embedded(pipeline_cfg=AUTO, precision_mode=precision)
    signature = converted(source, Path("out"), **options)
    found = stages()["pipeline_mapping"]
    assert found["layers/2/linear"] == found["tanh_2"] == found["layers/2/linear_1"]
    assert set(found.values()) == {0, 1}
    if precision is None:
        assert_runs_like(signature, model, x)
        assert_load_takes_it(source, model, x)


def test_parameters_that_tie_all_nodes_are_refused_by_name_and_load_takes_one_ipu():
    torch.manual_seed(0)
    model, x = Chain([0, 1, 0]), torch.randn(5, 8)
    source = saved(model, x)
    problem = (
        r"the program has 2 nodes for stages.*'layers/0/bias', 'layers/0/weight' by nodes from "
        r"'layers/0/linear' to 'layers/0/linear_1'.*'load'"
    )
    with pytest.raises(ValueError, match=problem):
        convert(source, "out", **embedded(pipeline_cfg={**AUTO, "min_ipu_quantity": 4}))
    assert not Path("out").exists()
    names = ["layers/0/linear", "tanh", "layers/1/linear", "tanh_1", "layers/0/linear_1", "tanh_2"]
    solution = {
        "device_mapping": [0, 1, 0],
        "pipeline_mapping": {name: i // 2 for i, name in enumerate(names)},
    }
    Path("s.json").write_text(json.dumps(solution))
    config = {"converter": "load", "solution_path": "s.json"}
    signature = converted(source, Path("out"), **embedded(num_ipus=2, pipeline_cfg=config))
    assert_runs_like(signature, model, x)
    solution["device_mapping"] = [0, 1, 2]
    Path("s.json").write_text(json.dumps(solution))
    with pytest.raises(ValueError, match=r"parameter 'layers/0/.*' is read on several IPUs"):
        convert(source, "again", **embedded(num_ipus=3, pipeline_cfg=config))


def test_a_residual_net_of_tensorflow_finds_its_stages():
    """Both of its normalisations have the same four variables."""
    pytest.importorskip("google.protobuf")
    source = FIXTURES / "resnet_block"
    stored = np.load(source / "serve-serving_default.npz")
    signature = converted(source, Path("out"), **embedded(pipeline_cfg=AUTO))
    feeds = {n[3:]: torch.from_numpy(stored[n]) for n in stored.files if n.startswith("in/")}
    for name, value in signature(**feeds).items():
        np.testing.assert_allclose(value.numpy(), stored[f"out/{name}"], rtol=0, atol=1e-5)
    found = stages()
    assert len(found["device_mapping"]) == 2
    norms = [n for n in found["pipeline_mapping"] if "FusedBatchNorm" in n]
    assert len({found["pipeline_mapping"][name] for name in norms}) == 1


class Shifted(Chain):
    """Every layer adds one constant."""

    def __init__(self, order, width=8):
        super().__init__(order, width)
        self.register_buffer("shift", torch.linspace(0, 1, width), persistent=False)

    def forward(self, x):
        for number in self.order:
            x = self.layers[number](x) + self.shift
        return x


def test_small_constants_are_on_every_ipu_that_reads_them():
    torch.manual_seed(0)
    model, x = Shifted([0, 1, 2, 3]), torch.randn(5, 8)
    source = saved(model, x)
    signature = converted(source, Path("out"), **embedded(pipeline_cfg=AUTO))
    assert_runs_like(signature, model, x)
    found = stages()["pipeline_mapping"]
    assert {found[name] for name in found if name.startswith("add")} == {0, 1}
    program = signature._runner._executable._model.program
    # two biases and the constant on each
    assert Counter(v.ipu for v in program.variables if v.type.shape == (8,)) == {0: 3, 1: 3}
    assert_load_takes_it(source, model, x)
    profile = json.loads(next(Path("pipeline-profiling").rglob("profile.json")).read_text())
    assert {n["always_live_bytes"] for name, n in profile["nodes"].items() if "add" in name} == {32}


def test_larger_constants_are_placed_as_parameters_are(monkeypatch):
    monkeypatch.setattr(copied_constants, "MOST_COPIED_BYTES", 31)
    torch.manual_seed(0)
    model, x = Shifted([0, 1, 2, 3]), torch.randn(5, 8)
    source = saved(model, x)
    with pytest.raises(ValueError, match="'shift' by nodes from 'add' to 'add_3'"):
        convert(source, "out", **embedded(pipeline_cfg={**AUTO, "min_ipu_quantity": 4}))
    config = {
        "converter": "manual",
        "manual_pipeline_config": [["layers/0", "add$"], ["layers/[1-3]", "add_"]],
        "device_info": [0, 1],
    }
    with pytest.raises(ValueError, match="parameter 'shift' is read on several IPUs, by 'add'"):
        convert(source, "out", **embedded(num_ipus=2, pipeline_cfg=config))


# --- The rule by itself --------------------------------------------------------------------------

NODES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9
)


@given(NODES, st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=4))
def test_blocks_end_where_no_parameter_is_read_on_both_sides(nodes, pairs):
    work = [WorkNode(f"n{i}", *node) for i, node in enumerate(nodes)]
    count = len(work)
    spans = sorted(
        (min(pair), max(pair), f"p{i}")
        for i, pair in enumerate(pairs)
        if max(pair) < count and pair[0] != pair[1]
    )
    found = join(work, spans)
    assert [node for block in found for node in block.nodes] == work
    ends = {sum(len(b.nodes) for b in found[: i + 1]) for i in range(len(found))}
    allowed = {i for i in range(1, count) if not any(a < i <= b for a, b, _ in spans)} | {count}
    assert ends == allowed
    for block in found:
        joined, memory = block.joined(), memory_of(block.nodes, 0)
        assert memory_of([joined], 0) == memory
        assert joined.cycles == sum(node.cycles for node in block.nodes)
        first = work.index(block.nodes[0])
        inside = {p for a, _, p in spans if first <= a < first + len(block.nodes)}
        assert set(block.parameters) == inside


def test_a_node_alone_is_itself():
    node = WorkNode("n", 1, 2, 3)
    assert Block((node,)).joined() == node
