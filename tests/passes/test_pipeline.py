"""Check that every step of both front ends is on the page, and runs under the manager."""

import inspect
import sys
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ipu_dynamo
from ipu_dynamo import (
    BeginBlock,
    CompileError,
    Options,
    StageSpec,
    Strategy,
    compile_inference,
    compile_training,
)
from ipu_dynamo.capture.capture import Capture
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.options import OptionError
from ipu_dynamo.passes import pipeline
from ipu_dynamo.passes.dump import DUMP
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.passes.levels import Partitioned, level_of
from ipu_dynamo.passes.manager import WITHOUT, PassManager, with_pass
from ipu_dynamo.passes.micro_batch.stream_rows import StreamRows
from ipu_dynamo.passes.pipeline import (
    all_passes,
    host_passes,
    lower,
    run_host_passes,
    whole_step,
)
from ipu_dynamo.passes.update_levels import UpdateFunctions, UpdateGraphs
from ipu_dynamo.program import Function, HostProgram, Program
from ipu_dynamo.program.share import Share
from tests.properties.evaluate import left_by
from tests.ranks.mesh import Pipeline

STEPS = [step for step in all_passes() if step.name != "CutBody"]  # which autograd runs
NAMES = [step.name for step in STEPS]
LEVELS = ("traced", "joint", "directions", "parts", "program", "host")
BATCH_LEVELS = ("split", "pieces")
UPDATE_LEVELS = ("recorded", "update", "functions", "function")
HOST = [step.name for step in host_passes(Options())]
CLEAN = "CopySourceLines"  # from here on every operator has a line again


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = BeginBlock(nn.Linear(3, 4), "first", 0)
        self.second = BeginBlock(nn.Linear(4, 2), "second", 1)

    def forward(self, x, y):
        return F.mse_loss(self.second(F.dropout(self.first(x), 0.5)), y)


class WithoutBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, y):
        return F.mse_loss(self.second(self.first(x).tanh()), y)


class ManyScales(nn.Module):
    """Small parameters of one shape, which are updated together."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(3) for _ in range(8)])

    def forward(self, x, y):
        return F.mse_loss(sum(x * scale for scale in self.scales)[:, :2], y)


BALANCED = {
    "strategy": Strategy("pipelined", ipus=2, costs=((1.0, 1.0),) * 5, schedule="zero_bubble"),
    "gradient_accumulation": 3,
    "workers": 1,
}
KEPT = {
    "strategy": Strategy(
        "pipelined", stages=(StageSpec(("first",)), StageSpec(("second",))), keep_stages=True
    ),
    "gradient_accumulation": 3,
    "workers": 1,
}


def batch():
    return torch.ones(6, 3), torch.ones(6, 2)


def captured(model, *, training=True):
    return trace(model, read_arguments(model, batch(), {}), training=training)


def trained(options=None, kind=Net, optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    model = kind()
    chosen = {"engine": "eager", "seed": 1, **(options or {})}
    step = compile_training(model, optimizer(model.parameters(), lr=0.1), chosen)
    step(*batch())
    return step


def through_dynamo(options=None):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(model, backend="ipu", options={"engine": "eager", **(options or {})})
    compiled(*batch()).backward()
    return model


def balanced(options=None):
    """No block is given: stages are chosen, and gradients of weights wait."""
    return trained({**BALANCED, **(options or {})}, WithoutBlocks)


def kept(options=None):
    """Stages stay as they are listed."""
    return trained({**KEPT, **(options or {})})


def by_traced_update(options=None):
    """The optimiser's Python is traced."""
    return trained(options, ManyScales, torch.optim.Adamax)


def in_micro_batches(options=None):
    return through_dynamo({"micro_batches": 2, **(options or {})})


@pytest.fixture
def dumped(tmp_path, monkeypatch):
    """The names of all passes that were dumped, by graph."""
    monkeypatch.setenv(DUMP, str(tmp_path / "new" / "folder"))

    def names():
        folders = sorted((tmp_path / "new" / "folder").iterdir())
        return {
            folder.name: [file.stem.partition("_")[2] for file in sorted(folder.glob("*_*.txt"))]
            for folder in folders
        }

    return names


# --- Every step of both pipelines ---------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS, ids=NAMES)
def test_a_step_has_a_name_a_level_and_says_what_it_does(step):
    assert step.name == type(step).__name__
    assert step.level in (*LEVELS, *BATCH_LEVELS, *UPDATE_LEVELS)
    text = inspect.getdoc(sys.modules[type(step).__module__])
    for word in ("Before   ", "After    ", "Keeps    ", "Source   "):
        assert f"\n{word}" in text
    with pytest.raises(AttributeError):  # frozen
        step.other = 1


def test_names_are_unique():
    assert len(set(NAMES)) == len(NAMES)


def training_steps(options):
    return [*whole_step(options, training=True), *host_passes(options)]


def update_steps():
    return names_of(pipeline.update_passes(Options()))


def names_of(steps):
    return [step.name for step in steps]


def passes_of(step):
    ((_, runs),) = step.explain().passes
    return runs


def dynamo_steps(*, micro_batches=False):
    options = Options()
    return [
        *pipeline.captured_passes(),
        *pipeline.placement_passes(options),
        *pipeline.aot_passes(options, micro_batches=micro_batches),
        *pipeline.cutting_passes(options),
        *pipeline.flat_passes(options),
        *pipeline.placed_passes(options),
        *pipeline.numeric_passes(options),
        *host_passes(options),
    ]


def on_a_rank(options=None):
    """Only a rank takes a share: of a program for two IPUs."""
    step = compile_inference(Pipeline(), Options("eager", strategy=Strategy("sharded")))
    step.compile(torch.ones(2, 4))
    steps = host_passes(Options(**(options or {})), Machine(share=Share(1, 2, 0, 0)))
    run_host_passes(step.program, steps, PassManager("rank", first="program"))


RUNS = {  # ways to compile that have every pass between them
    trained: names_of(training_steps(Options())),
    balanced: names_of(training_steps(Options(**BALANCED))),
    kept: names_of(training_steps(Options(**KEPT))),
    through_dynamo: names_of(dynamo_steps()),
    by_traced_update: [
        *update_steps(),
        *names_of(training_steps(Options())),
        "RetraceUpdate",  # of the first step
        "JoinUpdates",
        "WriteUpdates",
    ],
    in_micro_batches: names_of(
        [*dynamo_steps(micro_batches=True), *pipeline.split_passes(), StreamRows()]
    ),
    on_a_rank: ["TakeShare"],
}


def test_every_step_is_dumped_under_its_name(dumped):
    for run in RUNS:
        run()
    graphs = dumped()
    kinds = [name.partition("_")[2] for name in graphs]
    assert [kind for kind in kinds if kind != "update_function"] == [
        "training",
        "training",
        "training",
        "captured",
        "joint",
        "forward",
        "backward",
        "update",
        "training",
        "retraced",
        "captured",
        "joint",
        "forward",
        "forward_before",
        "forward_loop",
        "backward",
        "backward_loop",
        "inference",
        "rank",
    ]
    assert graphs["000_training"] == ["traced", *RUNS[trained]]
    assert graphs["001_training"] == ["traced", *RUNS[balanced]]
    assert graphs["002_training"] == ["traced", *RUNS[kept]]
    assert graphs["007_update"] == ["recorded", *update_steps()]
    seen = {name for names in graphs.values() for name in names}
    assert set(NAMES) <= seen


def runs_with(name):
    runs = [run for run, names in RUNS.items() if name in names]
    assert runs
    return runs


@pytest.mark.few(5)
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_step_is_named_in_any_error(name, monkeypatch):
    (kind,) = {type(step) for step in STEPS if step.name == name}

    def broken(self, model):
        raise RuntimeError("planted")

    monkeypatch.setattr(kind, "applies", lambda self, model, contents: True)
    monkeypatch.setattr(kind, "__call__", broken)
    for run in runs_with(name):
        with pytest.raises((RuntimeError, CompileError), match="planted") as caught:
            run()
        assert f"in pass {name}" in caught.value.__notes__


@cache
def result_of(run):
    return run()


@pytest.mark.few(14)
@pytest.mark.parametrize("step", STEPS, ids=NAMES)
def test_a_step_can_be_left_out_or_says_why_not(step):
    options = {"without": (step.name,)}
    if reason := step.needed:
        for run in (trained, through_dynamo):
            with pytest.raises(OptionError, match=f"{step.name} cannot be left out: {reason}"):
                run(options)
        return
    for run in runs_with(step.name):
        found, expected = run(options), result_of(run)
        if run in (trained, balanced, kept, by_traced_update):
            assert step.name not in names_of(passes_of(found))
            found, expected = found.model, expected.model
        for one, other in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other)
            torch.testing.assert_close(one.grad, other.grad)


def test_an_unknown_name_lists_near_ones(monkeypatch):
    with pytest.raises(OptionError, match="no pass 'outline'; did you mean: Outline"):
        trained({"without": ["outline"]})
    monkeypatch.setenv(WITHOUT, "Outline, Recomputation")
    for run in (trained, through_dynamo):
        with pytest.raises(OptionError, match="no pass 'Recomputation'; did you mean: Recompute"):
            run()
    with pytest.raises(OptionError, match="it is a tuple of names"):
        Options(without="Outline")


def test_the_environment_leaves_out(monkeypatch, dumped):
    monkeypatch.setenv(WITHOUT, "Outline,RoundScalars")
    trained()
    through_dynamo()
    seen = {name for names in dumped().values() for name in names}
    assert not seen & {"Outline", "RoundScalars"}
    assert "FuseLoss" in seen


# --- What is said of a change -------------------------------------------------------------------


@pytest.mark.parametrize("front_end", [trained, through_dynamo, by_traced_update])
def test_a_step_that_says_so_has_changed_nothing(front_end, monkeypatch):
    original = PassManager._run
    silent = []

    def run(self, step, model):
        before = everything(model)
        after = original(self, step, model)
        if not self.runs[-1].changed:
            silent.append(step.name)
            assert everything(after) == before, step.name
        return after

    monkeypatch.setattr(PassManager, "_run", run)
    front_end()
    assert "Outline" in silent
    assert "FuseLoss" in silent


def everything(model):
    """What a pass could change: the text, and what nodes know."""
    match model:
        case Partitioned():
            graphs = [part.graph for part in model.parts]
        case Capture():
            graphs = [model.graph]
        case Program():
            graphs = [function.graph for function in model.functions]
        case RecordedUpdate() | UpdateGraphs():
            graphs = [step.graph for step in model.steps]
        case Function():
            graphs = [model.graph]
        case UpdateFunctions():
            graphs = []
        case HostProgram():
            graphs = [function.graph for function in model.inlined.functions]
            graphs += [recipe.lowered.graph for recipe in model.recipes.values()]
    notes = [
        (n.name, sorted((k, str(v)) for k, v in n.meta.items() if k.startswith("ipu.")))
        for graph in graphs
        for n in graph.graph.nodes
    ]
    return write_level(model), notes


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_source_lines_are_kept_and_a_second_run_changes_nothing(training, narrow):
    model = captured(Net(), training=training)
    steps = whole_step(Options(narrow=narrow), training=training)
    names = names_of(steps)
    for step in steps:
        if step.name == "Partition":
            break
        model = left_by(step, model)
        cleaning = names.index("Differentiate") <= names.index(step.name) < names.index(CLEAN)
        for node in () if cleaning else model.graph.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                assert "forward" in (node.meta.get("stack_trace") or ""), f"{node} after {step}"
        if step.name == "Differentiate":
            continue
        before = str(model.graph.graph)
        assert step(model) in (False, model) or step.name == "NarrowTypes"
        assert str(model.graph.graph) == before or step.name == "NarrowTypes"


# --- Options ------------------------------------------------------------------------------------


def test_options_are_the_fields_of_the_passes():
    options = Options(loss_scale=4.0, narrow=True, gradient_accumulation=8)
    steps = {step.name: step for step in whole_step(options, training=True, loss=1)}
    assert steps["Placement"].micro_batches == 8
    assert steps["IdentityLoss"].output == 1
    assert steps["NarrowTypes"].narrow
    assert steps["StartBackward"].start == 4.0


def test_post_and_loss_divides_the_start_gradient_by_the_replicas():
    options = Options(mean_strategy="post_and_loss", replicas=4)
    steps = {step.name: step for step in whole_step(options, training=True)}
    assert steps["StartBackward"].start == 0.25


def test_some_steps_are_there_only_if_wanted():
    def extra(**options):
        strategy = Strategy(**options)
        steps = whole_step(Options(strategy=strategy), training=True)
        return set(names_of(steps)) - set(names_of(whole_step(Options(), training=True)))

    assert extra(kind="pipelined") == {"CheckPipelineHazards"}
    assert extra(kind="pipelined", ipus=2) == {"AutoPartition", "CheckPipelineHazards"}
    zero_bubble = extra(kind="pipelined", schedule="zero_bubble")
    assert zero_bubble == {"CheckPipelineHazards", "SplitWeightGradients"}


# --- The manager --------------------------------------------------------------------------------


def test_a_broken_invariant_is_blamed_on_the_pass_that_breaks_it():
    class WritesArgument(Pass):
        level = "joint"

        def __call__(self, capture):
            graph = capture.graph.graph
            first = next(n for n in graph.nodes if n.op == "call_function")
            with graph.inserting_after(first):
                new = graph.call_function(torch.ops.aten.relu_.default, (first,))
            new.meta = dict(first.meta)
            return True

    steps = with_pass(whole_step(Options(), training=True), WritesArgument(), after="RoundScalars")
    with pytest.raises(AssertionError, match=r"not functional: .* = aten\.relu_") as it:
        lower(captured(Net()), steps)
    assert it.value.__notes__[-1] == "in pass WritesArgument"


def test_an_error_is_noted_with_its_pass():
    def model(x, y):
        return x.sum() + y.sum()

    with pytest.raises(CompileError, match="Couldn't find a loss") as caught:
        lower(captured(model), whole_step(Options(), training=True))
    assert caught.value.__notes__[-1] == "in pass IdentityLoss"


def test_the_manager_counts_and_times():
    manager = PassManager("graph")
    lower(captured(Net()), whole_step(Options(), training=True), manager)
    runs = {run.name: run for run in manager.runs}
    assert runs["Differentiate"].before < runs["Differentiate"].after
    assert runs["Differentiate"].changed
    assert not runs["Outline"].changed
    assert all(run.seconds > 0 for run in manager.runs)
    assert str(runs["Outline"]).endswith("ms, nothing to do")


def test_levels_go_down(monkeypatch):
    seen = []
    manager = PassManager("graph", watch=lambda name, model: seen.append(level_of(model)))
    program = lower(captured(Net()), whole_step(Options(), training=True), manager)
    run_host_passes(program, manager=manager)
    assert sorted(seen, key=LEVELS.index) == seen
    assert set(seen) == set(LEVELS) - {"directions"}


# --- Explanations -------------------------------------------------------------------------------


def test_explanations_of_both_front_ends_list_every_step():
    step = trained()
    explained = ipu_dynamo.explain(step)
    assert str(explained) == str(step.explain()) == str(ipu_dynamo.inspect(step))
    assert names_of(passes_of(step)) == names_of(training_steps(Options()))
    assert any(str(run).startswith("Differentiate: 7 -> ") for run in passes_of(step))
    of_update = [*update_steps(), *names_of(training_steps(Options()))]
    assert names_of(passes_of(by_traced_update())) == of_update
    torch._dynamo.reset()
    (graph,) = ipu_dynamo.explain(Net(), *batch(), options={"engine": "eager"}).graphs
    kinds = dict(graph.passes)
    assert list(kinds) == ["captured", "joint", "forward", "backward"]
    assert names_of(kinds["joint"])[-1] == "SplitDirections"
    assert names_of(kinds["captured"])[0] == "ReadBlockMarkers"
    for kind in ("forward", "backward"):
        assert names_of(kinds[kind])[-len(HOST) :] == HOST


def test_both_front_ends_share_placement_constants_dropout_and_detach():
    calls = [inspect.getsource(f) for f in (pipeline.traced_passes, pipeline.joint_passes)]
    dynamo_pages = (pipeline.placement_passes, pipeline.aot_passes, pipeline.flat_passes)
    dynamo = [inspect.getsource(f) for f in dynamo_pages]
    for name in ("Placement(", "LiftJointConstants(", "RemoveIdleDropout(", "RemoveDetach("):
        assert name in "".join(calls)
        assert name in "".join(dynamo)


# --- Dumps --------------------------------------------------------------------------------------


def test_a_dump_shows_types_stages_and_lines(tmp_path, monkeypatch):
    monkeypatch.setenv(DUMP, str(tmp_path))
    trained()
    texts = {f.stem.partition("_")[2]: f.read_text() for f in (tmp_path / "000_training").iterdir()}
    assert "ipu.begin_block" in texts["traced"]
    assert "ipu.begin_block" not in texts["Placement"]
    (linear,) = (line for line in texts["Placement"].splitlines() if "%linear: f32[6,4] =" in line)
    assert "aten.linear.default(" in linear
    assert '"ipu.stage": 0' in linear
    assert "test_pipeline.py:" in linear
    assert '"ipu.stage": 1, "ipu.backward": True' in texts["ReadStages"]
    assert "= aten.native_dropout." not in texts["CounterRandom"]
    assert 'Part(stage=0, direction="forward", ipu=0,' in texts["Partition"]
    assert texts["Emit"].startswith("ipu_dynamo program, ")


def test_graphs_never_overwrite_each_other(dumped):
    trained()
    trained()
    assert list(dumped()) == ["000_training", "001_training"]


def test_the_dump_of_a_model_that_fails_ends_before_the_pass(dumped):
    def model(x):
        with ipu_dynamo.Block("a", 0):
            x = x + 1
        return x * 2

    with pytest.raises(CompileError):
        compile_inference(model, {"engine": "eager"})(torch.ones(1))
    # the next is Placement, which failed
    assert dumped() == {
        "000_inference": [
            "traced",
            "NameValues",
            "TitlePrints",
            "LiftConstants",
            "CheckTypes",
            "OverlapIO",
            "TagConvolutionGroups",
        ]
    }


def test_nothing_is_dumped_unless_asked(tmp_path, monkeypatch):
    monkeypatch.delenv(DUMP, raising=False)
    monkeypatch.chdir(tmp_path)
    compile_inference(lambda x: x + 1, {"engine": "eager"})(torch.ones(1))
    assert not list(tmp_path.iterdir())
