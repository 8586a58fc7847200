"""Check that stages which are given for every operator are those of the program."""

from operator import getitem

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx import traceback

from ipu_dynamo import (
    Block,
    CompileError,
    Options,
    StageSpec,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.options import OptionError
from ipu_dynamo.testing import assert_same_bits, aten_graphs
from tests.properties.evaluate import captured

NAME = "name"  # key of meta["custom"]


class Placed(nn.Module):
    """Runs a graph in its own order, each operator in the block of its stage."""

    def __init__(self, graph, stages):
        super().__init__()
        self.graph, self.stages = [graph], stages  # in a list: no submodule

    def forward(self, *inputs):
        graph, stages = self.graph[0], self.stages

        class Blocks(fx.Interpreter):
            def call_function(self, target, args, kwargs):
                name = self.current.name
                with Block(f"s{stages[name]}"), traceback.annotate({NAME: name}):
                    return super().call_function(target, args, kwargs)

            def run_node(self, n):
                self.current = n
                return super().run_node(n)

        with traceback.preserve_node_meta():
            return Blocks(graph).run(*inputs)


@st.composite
def staged_graphs(draw):
    """A graph, inputs, a stage for each operator that follows the data, and an IPU for each."""
    graph, inputs = draw(aten_graphs(max_ops=6))
    graph.graph.eliminate_dead_code()  # what nobody reads is in no function
    graph.recompile()
    count, stages = draw(st.integers(1, 4)), {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            least = max(stages.get(source.name, 0) for source in node.all_input_nodes)
            part = node.target is getitem  # runs where the operator runs that makes it
            stages[node.name] = least if part else draw(st.integers(least, count - 1))
    used = sorted(set(stages.values()))
    stages = {name: used.index(stage) for name, stage in stages.items()}
    return graph, inputs, stages, draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))


def strategy_of(stages, ipus):
    count = len(set(stages.values()))
    specs = tuple(StageSpec((f"s{stage}",), ipus[stage]) for stage in range(count))
    return Strategy("pipelined", stages=specs, keep_stages=True)


def of_stages(program):
    """For every call its stage and IPU, and the names of what its function computes."""
    functions = {function.name: function for function in program.functions}
    return [
        (
            call.stage,
            call.ipu,
            {
                node.meta["custom"][NAME]
                for node in functions[call.function].graph.graph.nodes
                if NAME in (node.meta.get("custom") or {})
            },
        )
        for call in program.calls
    ]


@given(case=staged_graphs())
def test_every_operator_runs_in_its_stage_and_results_are_the_same(case):
    graph, inputs, stages, ipus = case
    if not stages:
        return
    note(f"{graph.graph}\n{stages} {ipus}")
    strategy = strategy_of(stages, ipus)
    count = len(strategy.stages)
    options = Options(
        engine="eager", device_iterations=count, strategy=strategy, outline=False, workers=1
    )
    compiled = compile_inference(Placed(graph, stages), options)
    batches = [[x + i for x in inputs] for i in range(count)]
    results = compiled(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    expected = [graph(*parts) for parts in batches]
    for position, (result, output) in enumerate(
        zip(results, compiled.program.outputs, strict=True)
    ):
        parts = [values[position] for values in expected]
        assert_same_bits(result, parts[0] if output.returns == "once" else torch.cat(parts))
    note(compiled.program.text())
    calls = {n.name: stages[n.name] for n in graph.graph.nodes if n.name in stages}
    for node in graph.graph.find_nodes(op="call_function", target=getitem):
        del calls[node.name]  # goes with the operator that makes it
    assert of_stages(compiled.program) == [
        (stage, ipus[stage], {name for name, own in calls.items() if own == stage})
        for stage in range(count)
    ]


class Chain(nn.Module):
    def __init__(self, *names):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in names)
        self.names = names

    def forward(self, x):
        h = x
        for name, layer in zip(self.names, self.layers, strict=True):
            with Block(name):
                h = torch.tanh(layer(h))
        with Block(self.names[-1]):
            return F.mse_loss(h, x) if self.training else h


def chain_options(kept, **more):
    stages = tuple(StageSpec((name,), ipu) for name, ipu in (("a", 0), ("b", 0), ("c", 1)))
    strategy = Strategy("pipelined", stages=stages, keep_stages=kept)
    return Options(engine="eager", strategy=strategy, outline=False, **more)


@pytest.mark.parametrize(("kept", "ipus"), [(True, [0, 0, 1]), (False, [0, 1])])
def test_neighbours_on_one_ipu_stay_two_under_the_option_only(kept, ipus):
    compiled = compile_inference(
        Chain("a", "b", "c").eval(), chain_options(kept, device_iterations=3)
    )
    compiled.compile(torch.ones(6, 4))
    assert [call.ipu for call in compiled.program.calls] == ipus


def test_training_with_kept_stages_gives_the_same_weights():
    x, weights = torch.randn(10, 4), []
    for kept in (False, True):
        torch.manual_seed(0)
        model = Chain("a", "b", "c")
        step = compile_training(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            chain_options(kept, gradient_accumulation=5),
        )
        for _ in range(2):
            step(x)
        weights.append([p.detach().clone() for p in model.parameters()])
        assert len(step.program.calls) == (5 if kept else 3)
    assert_same_bits(*weights)


def test_a_kept_pipeline_counts_stages_and_not_changes_of_the_ipu():
    def mixed(x):
        a = x
        for _ in range(3):  # the graph's order visits both IPUs again and again
            with Block("a"):
                a = a + 1
            with Block("b"):
                b = a * 2
        return b

    stages = (StageSpec(("a",), 0), StageSpec(("b",), 1))
    strategy = Strategy("pipelined", stages=stages, keep_stages=True)
    compiled = compile_inference(
        mixed, Options(engine="eager", device_iterations=2, strategy=strategy)
    )
    x = torch.arange(2.0)
    assert_same_bits(compiled(x), (x + 3) * 2)


def test_a_view_that_shows_what_another_stage_had_stays():
    def twice(x):
        with Block("a"):
            once = torch.sin(x).t()
        with Block("b"):
            return torch.cos(once.t())

    stages = (StageSpec(("a",), 0), StageSpec(("b",), 1))
    strategy = Strategy("pipelined", stages=stages, keep_stages=True)
    compiled = compile_inference(
        twice, Options(engine="eager", device_iterations=2, strategy=strategy)
    )
    x = torch.arange(12.0).reshape(6, 2)
    assert_same_bits(compiled(x), torch.cos(torch.sin(x)))
    found = [[node.target for node in one.operators] for one in compiled.program.functions]
    aten = torch.ops.aten
    assert found[1] == [aten.t.default, aten.cos.default]


def test_operators_are_sorted_by_stage_and_stay_in_their_order_within():
    def mixed(x):
        with Block("a"):
            a = torch.sin(x)
        with Block("b"):
            b = torch.cos(a)
        with Block("a"):
            c = torch.tanh(a)
        with Block("b"):
            return torch.exp(b) + c

    stages = (StageSpec(("a",), 0), StageSpec(("b",), 0))
    strategy = Strategy("pipelined", stages=stages, keep_stages=True)
    options = Options(device_iterations=2, strategy=strategy)
    capture, sort = captured(mixed, (torch.ones(2),), options, training=False, before="SortByStage")
    assert sort(capture)
    operators = [n for n in capture.graph.graph.nodes if n.op == "call_function"]
    names = [n.target.__name__.split(".")[0] for n in operators]
    assert names == ["sin", "tanh", "cos", "exp", "add"]
    capture.graph.graph.lint()
    assert not sort(capture)


def test_a_stage_without_operators_is_refused():
    with pytest.raises(CompileError, match=r"stage 1 has no operators; its blocks are \['b'\]"):
        compile_inference(
            Chain("a", "c", "c").eval(), chain_options(True, device_iterations=3)
        ).compile(torch.ones(6, 4))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "sharded", "stages": (StageSpec(("a",)),)},
        {"kind": "pipelined"},
        {"kind": "pipelined", "stages": (StageSpec(("a",)),), "keep_stages": 1},
    ],
)
def test_kept_stages_need_a_pipeline_with_explicit_ones(fields):
    with pytest.raises(OptionError, match="keep_stages"):
        Strategy(**{"keep_stages": True, **fields})
