"""Check that a planted fault is found where it was planted, and that its repro shows it."""

import contextlib
import dataclasses
import math
import re
import runpy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import Block, Options, ReplicaGroups, Strategy, bisect
from ipu_dynamo.capture.capture import BACKWARD, Capture
from ipu_dynamo.debug import bisect as module
from ipu_dynamo.options import OptionError
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.host.functions.rewrite_functions import rewrite_functions
from ipu_dynamo.passes.host.recipes import avoid_inductor_faults
from ipu_dynamo.passes.levels import Partitioned
from ipu_dynamo.program import Decision
from ipu_dynamo.runtime.engines import engines

aten = torch.ops.aten


class Net(nn.Module):
    """Two stages with operators that a fault can be planted in, each on a line of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x, y):
        with Block("one", ipu_id=0):
            h = self.norm(self.first(x))
            h = torch.tanh(h)
            h = h * 3.0
        with Block("two", ipu_id=1):
            out = self.second(h)
            out = out.sigmoid()
            return out, F.cross_entropy(out, y)


def data():
    torch.manual_seed(0)
    return Net(), torch.randn(6, 4), torch.randint(3, (6,))


EAGER = Options("eager")


@pytest.fixture
def plant(monkeypatch):
    """Make the pass with this name do something else to the graph after its work."""

    def planted(name, fault):
        def planting(original):
            def steps_of(*args, **kwargs):
                steps = original(*args, **kwargs)
                return [Faulty(step, fault) if name == step.name else step for step in steps]

            return steps_of

        for lister in ("whole_step", "host_passes"):
            monkeypatch.setattr(module, lister, planting(getattr(module, lister)))

    return planted


class Faulty:
    def __init__(self, original, fault):
        self.original, self.fault = original, fault
        self.name, self.level = original.name, original.level

    def applies(self, model, contents):
        return True

    def __call__(self, model):
        result = self.original(model)
        after = model if isinstance(result, bool) else result
        if isinstance(after, Capture):
            self.fault(after.graph.graph)
            after.graph.recompile()
            return True if after is model else after
        if isinstance(after, Partitioned):
            return planted_in_parts(after, self.fault)
        return planted_in_host(after, self.fault)


def planted_in_host(host, fault):
    """What a wrong host pass leaves; passes copy the functions that they rewrite."""

    def rewrite(graph):
        with contextlib.suppress(AssertionError):
            fault(graph)

    return rewrite_functions(host, rewrite, lambda graph: True, Decision("Planted", "wrong"))


def planted_in_parts(partitioned, fault):
    """What a wrong pass leaves: graphs of stages with the fault, where it finds its operator."""
    for part in partitioned.parts:
        with contextlib.suppress(AssertionError):
            fault(part.graph.graph)
        part.graph.recompile()
    return dataclasses.replace(partitioned, returned=tuple(partitioned.returned))


def nodes(graph, target):
    found = [node for node in graph.nodes if node.target is target]
    assert found, f"no {target} in {graph}"
    return found


def scale_constant(graph):
    for node in nodes(graph, aten.mul.Tensor):
        if node.args[1] == 3.0:
            node.args = (node.args[0], 3.01)
            return


def replace_sigmoid(graph):
    """As a rewrite would: another operator takes the place, with its own name."""
    (node, *_) = nodes(graph, aten.sigmoid.default)
    with graph.inserting_before(node):
        new = call(graph, aten.relu.default, node.args[0], origin=node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def halve_gradient_of_tanh(graph):
    (node,) = nodes(graph, aten.tanh_backward.default)
    with graph.inserting_after(node):
        new = call(graph, aten.div.Tensor, node, 2.0, origin=node)
    node.replace_all_uses_with(new)
    new.args = (node, 2.0)


@pytest.fixture
def shown(capsys):
    """What a repro prints: the difference, relative."""

    def run(path):
        before = sys.path.copy()
        runpy.run_path(str(path), run_name="__main__")
        assert sys.path == before
        return relative(capsys.readouterr().out)

    return run


def relative(printed):
    off, scale = re.search(r"difference (\S+), largest expected number (\S+)", printed).groups()
    return float(off) / float(scale)


def test_a_right_program_has_no_difference(tmp_path):
    model, x, y = data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pipelined = Options(
        "eager", gradient_accumulation=4, device_iterations=2, replicas=2,
        strategy=Strategy("pipelined"), loss_scale=8.0, mean_strategy="running",
    )  # fmt: skip
    path = tmp_path / "repro.py"
    for options in (EAGER, pipelined, Options("eager", narrow=True)):
        for training in (False, True):
            assert bisect(model, x, y, training=training, options=options, repro=path) is None
    assert not path.exists()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name",
    ["Placement", "IdentityLoss", "NarrowTypes", "Differentiate", "RoundScalars", "CounterRandom",
     "AssignGradientStages"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("fault", "line"),
    [(scale_constant, "h = h * 3.0"), (replace_sigmoid, "out = out.sigmoid()")],
)
def test_a_fault_in_any_pass_is_found_at_its_line(plant, tmp_path, name, fault, line):
    model, x, y = data()
    plant(name, fault)
    path = tmp_path / "repro.py"
    found = bisect(model, x, y, training=True, options=EAGER, repro=path)
    assert found.step == f"pass {name}"
    assert found.source.endswith(f"in forward: {line}")
    assert f"on ipu{0 if 'h = h' in line else 1}" in found.instruction
    assert found.error > 1e-3
    assert found.repro == path


@pytest.mark.parametrize("name", ["Differentiate", "RoundScalars", "AssignGradientStages"])
def test_a_fault_in_the_backward_pass_is_found_at_its_line(plant, tmp_path, name, shown):
    model, x, y = data()
    plant(name, halve_gradient_of_tanh)
    path = tmp_path / "repro.py"
    found = bisect(model, x, y, training=True, options=EAGER, repro=path)
    assert found.step == f"pass {name}"
    assert found.source.endswith("in forward: h = torch.tanh(h)")
    assert math.isclose(found.error, 0.5, rel_tol=0.01)
    assert math.isclose(shown(path), 0.5, rel_tol=0.01)


def test_the_repro_runs_alone_and_shows_the_same(plant, tmp_path):
    model, x, y = data()
    plant("RoundScalars", scale_constant)
    found = bisect(model, x, y, training=True, options=EAGER, repro=tmp_path / "repro.py")
    assert math.isclose(found.error, 0.01 / 3, rel_tol=0.01)
    run = subprocess.run(
        [sys.executable, "-I", found.repro], capture_output=True, text=True, check=True
    )
    assert math.isclose(relative(run.stdout), found.error, rel_tol=0.01)
    assert "import ipu_dynamo" not in found.repro.read_text()
    assert str(found).splitlines()[0] == (
        "pass RoundScalars changes a value, by 0.0033 of the largest number in it"
    )


def test_a_loss_that_is_scaled_wrongly_is_found(plant, tmp_path, shown):
    """The forward pass is right, and every gradient is wrong by the same factor."""
    model, x, y = data()

    def double_start(graph):
        (node,) = [n for n in nodes(graph, aten.full.default) if n.meta[BACKWARD]]
        node.args = (node.args[0], 2.0)

    plant("StartBackward", double_start)
    path = tmp_path / "repro.py"
    found = bisect(model, x, y, training=True, options=EAGER, repro=path)
    assert found.step == "pass StartBackward"
    assert "cross_entropy" in found.source
    assert math.isclose(shown(path), 1.0, rel_tol=0.01)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name",
    ["Partition", "SplitGradientSums", "Outline", "InlineWrites", "FuseLoss", "AccumulateMatmuls"],
)
def test_a_fault_in_the_graphs_of_stages_is_blamed_on_its_pass(name, plant, tmp_path, shown):
    """The whole graph is right, the function of stage 0 is not."""
    plant(name, scale_constant)
    model, x, y = data()
    found = bisect(model, x, y, training=True, options=EAGER, repro=tmp_path / "repro.py")
    assert found.step == f"pass {name}"
    assert found.source.endswith("in forward: h = h * 3.0")
    assert "call @forward0" in found.instruction
    assert math.isclose(shown(found.repro), 0.01 / 3, rel_tol=0.01)


class WrongEngine(engines.EagerEngine):
    """Computes sin for tanh, as a compiler might."""

    name = "wrong"

    def compile(self, recipes):
        return [*map(self.computes_wrong, recipes)]

    def computes_wrong(self, recipe):
        graph = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
        graph.graph.output(graph.graph.graph_copy(recipe.function.graph.graph, {}))
        for node in graph.graph.find_nodes(op="call_function", target=aten.tanh.default):
            node.target = aten.sin.default
        graph.recompile()
        return lambda arguments: graph(*arguments)


def test_a_fault_in_the_engine_is_found_at_its_operator(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "make_engine", lambda name, check: WrongEngine())
    model, x, y = data()
    written = []
    monkeypatch.setattr(module, "repro_of_engine", lambda *args: written.append(args))
    found = bisect(model, x, y, training=True, options=EAGER, repro=tmp_path / "repro.py")
    assert found.step == "engine wrong"
    assert found.operator == "%tanh = aten.tanh.default"
    assert found.source.endswith("in forward: h = torch.tanh(h)")
    assert "call @forward0" in found.instruction
    ((wrong, node, engine, _),) = written
    assert (wrong.call.stage, node.target, engine) == (0, aten.tanh.default, "wrong")


@pytest.mark.slow
@pytest.mark.inductor
def test_a_fault_of_inductor_is_found_and_its_repro_shows_it(monkeypatch, tmp_path, shown):
    """Inductor of PyTorch 2.13 overwrites what it still has to read."""
    monkeypatch.setattr(avoid_inductor_faults, "miscompiled", lambda graph: None)
    torch.manual_seed(0)
    x, weight, index = torch.randn(3, 3), torch.randn(3, 3), torch.tensor([1, 1, 0])

    def model(x, weight):
        h = x @ weight
        rows = h.index_add(0, index, h)
        return rows @ weight, x.t() @ rows

    options = Options("inductor")
    found = bisect(model, x, weight, options=options, repro=tmp_path / "repro.py")
    assert found.step == "engine inductor"
    assert found.source.endswith("in model: rows = h.index_add(0, index, h)")
    assert found.error > 1e-3
    assert shown(found.repro) > 1e-3


def test_large_inputs_lie_beside_the_repro(plant, tmp_path, shown):
    def double(graph):
        (node,) = nodes(graph, aten.mul.Tensor)
        node.args = (node.args[0], 4.0)

    plant("RoundScalars", double)
    x = torch.randint(100, (600, 600))  # whole numbers are not drawn from a seed
    found = bisect(lambda x: x * 2, x, options=EAGER, repro=tmp_path / "repro.py")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repro.pt", "repro.py"]
    assert shown(found.repro) == 1.0


def test_random_models_are_compared_from_their_numbers_on(plant, tmp_path):
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = F.dropout(self.fc(x), 0.5)
            return F.mse_loss(h * 3.0, x)

    x = torch.randn(5, 4)
    torch.manual_seed(0)
    model = Random()
    assert bisect(model, x, training=True, options=EAGER) is None
    plant("AssignGradientStages", scale_constant)
    found = bisect(model, x, training=True, options=EAGER, repro=tmp_path / "repro.py")
    assert found.source.endswith("in forward: return F.mse_loss(h * 3.0, x)")


def test_rtol_decides_what_rounding_is(plant, tmp_path):
    model, x, y = data()
    plant("RoundScalars", scale_constant)
    assert bisect(model, x, y, options=EAGER, rtol=0.5) is None
    assert bisect(model, x, y, options=EAGER, rtol=1e-3, repro=tmp_path / "repro.py") is not None


def test_weights_of_several_groups_are_refused():
    options = Options(replicas=2, replica_groups={"first.bias": ReplicaGroups(1)})
    with pytest.raises(OptionError, match="bisect, which runs one replica"):
        bisect(Net(), torch.randn(2, 4), torch.tensor([0, 1]), options=options)
