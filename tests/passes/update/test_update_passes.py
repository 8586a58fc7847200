"""Check the passes on the step of an optimiser that was traced."""

import pytest
import torch
from torch import fx, nn
from torch.optim import Optimizer

from ipu_dynamo import Options, compile_training, identity_loss
from ipu_dynamo.capture.update.record_update import record_update
from ipu_dynamo.capture.update.trace_step import UntraceableUpdate
from ipu_dynamo.capture.update.world import world_of
from ipu_dynamo.passes.graph.builder import call_on
from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.pipeline import update_passes
from ipu_dynamo.passes.update.drop_copies import DropCopies
from ipu_dynamo.passes.update.tensorify_scalars import OPERATORS_OF_NUMBERS
from ipu_dynamo.passes.update_levels import UpdateGraphs, UpdateStep

aten = torch.ops.aten


class Centred(Optimizer):
    """Counts its steps, copies its states, and moves parameters by each other's gradients."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            norm = sum(p.grad.square().sum() for p in group["params"]).sqrt()
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("mean", torch.zeros_like(p))
                state["step"] = state.get("step", 0) + 1
                state["mean"].copy_(torch.lerp(state["mean"], p.grad / norm, 1 / state["step"]))
                p.sub_(state["mean"] * torch.tensor([0.5]), alpha=group["lr"])


class SwapsStates(Centred):
    """Gives each parameter the state of the other one."""

    @torch.no_grad()
    def step(self):
        super().step()
        first, second = (self.state[p] for p in self.param_groups[0]["params"])
        first["mean"], second["mean"] = second["mean"], first["mean"]


class Mixed(Centred):
    """Makes a tensor of several numbers in its step."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * torch.tensor([0.5, 0.25, 0.125]), alpha=group["lr"])


KINDS = (Centred, SwapsStates, torch.optim.RAdam, torch.optim.NAdam)


def recorded(kind):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    names = {id(weight): f"weight{i}" for i, weight in enumerate(weights)}
    return record_update(world_of(kind(weights, lr=0.1), names), OPERATORS_OF_NUMBERS)


def computed(step):
    """Run a step on drawn tensors, with equal counts for all parameters."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for node in step.graph.graph.find_nodes(op="placeholder"):
        like = node.meta["val"]
        if like.dim():
            values.append(torch.randn(like.shape, generator=generator).abs().to(like.dtype))
        else:
            values.append(torch.full((), 7 if like.dtype == torch.int64 else 0.3, dtype=like.dtype))
    return fx.Interpreter(step.graph).run(*values)


@pytest.mark.parametrize("kind", KINDS)
def test_keeps_values_and_a_second_run_changes_nothing(kind):
    model, before = recorded(kind), None
    manager = PassManager("update", first="recorded")
    for step in update_passes(Options()):
        model = manager.run([step], model)
        if not isinstance(model, UpdateGraphs):
            continue
        after = [computed(one) for one in model.steps]
        if before is not None:
            for ours, theirs in zip(after, before, strict=True):
                assert all(map(torch.equal, ours, theirs)), step.name
        if step.level == "update":
            text = write_level(model)
            assert not step(model), step.name
            assert write_level(model) == text
        before = after
    changed = {run.name for run in manager.runs if run.changed}
    assert {"RemoveWrites", "JoinEqual", "PlanUpdate", "AssignOwners", "CutUpdate"} <= changed


def counters_that_are_read(step):
    return [path for path, node in step.leaves.items() if "step" in path and node.users]


def constants(step):
    return list(step.graph.graph.find_nodes(op="get_attr"))


def copies(step):
    targets = (aten.clone.default, aten.copy.default)
    return [node for node in step.graph.graph.nodes if node.target in targets]


@pytest.mark.parametrize(
    ("name", "found_in", "left"),
    [
        ("ShareCounters", counters_that_are_read, 1),
        ("FillConstants", constants, 0),
        ("DropCopies", copies, 0),
    ],
)
def test_a_pass_removes_all_that_it_can(name, found_in, left):
    steps = update_passes(Options())
    place = next(i for i, step in enumerate(steps) if step.name == name)
    model = PassManager("update").run(steps[:place], recorded(Centred))
    assert len(found_in(model.steps[-1])) >= 2  # of two parameters
    PassManager("update").run([steps[place]], model)
    assert len(found_in(model.steps[-1])) == left


def test_copies_to_another_device_dtype_or_shape_stay():
    graph = fx.Graph()
    x = graph.placeholder("x")
    likes = {
        "device": torch.empty(3, device="meta"),
        "dtype": torch.empty(3, dtype=torch.float64),
        "shape": torch.empty(2, 3),
        "nothing": torch.empty(3),
    }
    nodes = {name: graph.placeholder(name) for name in likes}
    for node, value in zip((x, *nodes.values()), (torch.empty(3), *likes.values()), strict=True):
        node.meta["val"] = value
    results = [call_on(graph, aten.copy.default, node, x) for node in nodes.values()]
    graph.output(tuple(results))
    step = UpdateStep(None, fx.GraphModule(nn.Module(), graph))
    assert DropCopies()(UpdateGraphs((), (), (step,)))
    assert graph.output_node().args[0] == (*results[:3], x)


def test_the_level_ends_with_a_function_for_each_parameter():
    model = PassManager("update").run(update_passes(Options()), recorded(torch.optim.RAdam))
    assert model.stands == (0, 0)  # one is traced for both
    for step in model.steps:
        assert step.functions["weight0"] == step.functions["weight1"]
        assert step.functions.keys() == step.states.keys() == step.arguments.keys()
    assert [len(states) for states in model.plan.states] == [2, 2]


def test_an_error_names_the_pass():
    weight = nn.Parameter(torch.zeros(2, 3))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return identity_loss(self.weight * x, "sum")

    model = Model()
    step = compile_training(model, Mixed(model.parameters()), {"engine": "eager"})
    with pytest.raises(UntraceableUpdate, match="a tensor of the values") as caught:
        step(torch.ones(2, 3))
    assert "in pass FillConstants" in caught.value.__notes__
