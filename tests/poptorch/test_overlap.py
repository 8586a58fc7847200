"""Check `poptorch.set_overlap_for_input` and `set_overlap_for_output` from PopTorch programs."""

from collections import namedtuple

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.program import Program, Receive, Send
from poptorch import OverlapMode

Pair = namedtuple("Pair", "left right")
MODES = {
    OverlapMode.NoOverlap: "",
    OverlapMode.OverlapAccumulationLoop: "within a device iteration",
    OverlapMode.OverlapDeviceIterationLoop: "within a call",
}
ACTIVE = list(MODES)[1:]


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')


class Model(nn.Module):
    """A layer whose input, outputs and target are marked, each with a mode or not at all."""

    def __init__(self, x=None, y=None, out=None, loss=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.modes = {"x": x, "y": y, "out": out, "loss": loss}

    def mark(self, name, tensor, mark=poptorch.set_overlap_for_input):
        mode = self.modes[name]
        return tensor if mode is None else mark(tensor, mode)

    def forward(self, x, y):
        x, y = self.mark("x", x), self.mark("y", y)
        out = self.layer(x)
        loss = nn.functional.mse_loss(out, y)
        mark = poptorch.set_overlap_for_output
        return self.mark("out", out, mark), self.mark("loss", loss, mark)


def options(*, tiles=32, strategy=None, mode=poptorch.OutputMode.All, accumulation=3):
    options = poptorch.Options().deviceIterations(2).outputMode(mode)
    options.setExecutionStrategy(strategy or poptorch.ShardedExecution())
    options.Training.gradientAccumulation(accumulation)
    if tiles:
        options.TensorLocations.numIOTiles(tiles)
    return options


def trained(given, **modes):
    model = Model(**modes)
    executor = poptorch.trainingModel(model, given)
    torch.manual_seed(1)
    data = torch.randn(12, 4), torch.randn(12, 2)
    results = [tensor for _ in range(2) for tensor in executor(*data)]
    return executor, [*results, model.layer.weight.detach()]


def compiled(forward, inputs=1):
    executor = poptorch.inferenceModel(forward, options(accumulation=1))
    executor.compile(*[torch.ones(4, 3)] * inputs)
    return executor._core.program


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_keeps_the_results_and_says_when_it_transfers(mode):
    _, expected = trained(options(tiles=0))
    executor, found = trained(options(), x=mode, y=mode, out=mode, loss=mode)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    program = executor._core.program
    assert Program.parse(program.text()) == program
    lines = [str(i) for i in program.walk() if isinstance(i, Receive | Send)]
    assert len(lines) == 4
    ends = [f", one micro-batch {when} {MODES[mode]}" for when in ("ahead", "later")]
    for line, end in zip(lines, [ends[0], ends[0], ends[1], ends[1]], strict=True):
        assert line.endswith(end) if MODES[mode] else "micro-batch" not in line
    assert "32 IO tiles on each IPU" in str(program)


def test_each_input_and_output_has_a_mode_of_its_own():
    executor, _ = trained(options(), x=ACTIVE[0], loss=ACTIVE[1])
    program = executor._core.program
    assert [s.overlap for s in program.inputs] == ["accumulation_loop", "no_overlap"]
    assert [s.overlap for s in program.outputs] == ["no_overlap", "device_iteration_loop"]
    assert "input %x: f32[2,4]  overlapped in the accumulation loop" in program.short()
    assert "return all  overlapped in the loop over device iterations" in program.short()


def test_structures_keep_their_form():
    def forward(x, y):
        given = {"pair": Pair(x, [y, None]), "n": 3}
        marked = poptorch.set_overlap_for_input(given, ACTIVE[0])
        (left, (right, nothing)), n = marked["pair"], marked["n"]
        assert (type(marked["pair"]), nothing, n) == (Pair, None, 3)
        return poptorch.set_overlap_for_output((left * right,), ACTIVE[1])

    program = compiled(forward, inputs=2)
    assert [s.overlap for s in program.inputs] == ["accumulation_loop"] * 2
    assert [s.overlap for s in program.outputs] == ["device_iteration_loop"]


@pytest.mark.parametrize("mark", [poptorch.set_overlap_for_input, poptorch.set_overlap_for_output])
def test_on_the_host_the_tensors_themselves_come_back(mark):
    x = torch.ones(2)
    assert mark(x, ACTIVE[0]) is x
    assert mark([x, 1], ACTIVE[1]) == [x, 1]
    with pytest.raises(AssertionError, match="OverlapMode"):
        mark(x, "accumulation_loop")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        (
            lambda x, mode: poptorch.set_overlap_for_input(x, mode) + x,
            "must be the only op applied to an input",
        ),
        (
            lambda x, mode: poptorch.set_overlap_for_input(x + 1, mode) * 2,
            "applied on a node which is not a tensor input to the model.",
        ),
        (
            lambda x, mode: poptorch.set_overlap_for_output(x + 1, mode) * 2,
            "applied on a node which is not a tensor output to the model.",
        ),
        (
            lambda x, mode: [poptorch.set_overlap_for_output(x + 1, mode)] * 2,
            "returned 2 times",
        ),
    ],
)
def test_a_mark_in_the_wrong_place_is_refused(forward, problem, mode):
    with pytest.raises(poptorch.Error, match=problem):
        compiled(lambda x: forward(x, mode))


@pytest.mark.parametrize("mode", ACTIVE)
@pytest.mark.parametrize("which", ["x", "out"])
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tiles": 0}, "No IO tiles allocated. You must allocate at least 32 IO tiles"),
        ({"strategy": poptorch.PipelinedExecution()}, "PipelinedExecution"),
        ({"mode": poptorch.OutputMode.Final}, "output mode final"),
    ],
    ids=["tiles", "pipelined", "final"],
)
def test_what_overlap_needs_is_checked(changes, problem, which, mode):
    with pytest.raises(poptorch.Error, match=problem):
        trained(options(**changes), **{which: mode})


def test_without_overlap_nothing_is_needed():
    strategy, mode = poptorch.PipelinedExecution(), poptorch.OutputMode.Final
    modes = dict.fromkeys(["x", "out"], OverlapMode.NoOverlap)
    trained(options(tiles=0, strategy=strategy, mode=mode), **modes)


def test_sums_may_overlap():
    executor, _ = trained(options(mode=poptorch.OutputMode.Sum), x=ACTIVE[0], out=ACTIVE[0])
    assert executor._core.program.outputs[0].overlap == "accumulation_loop"


def test_io_tiles_of_the_lower_layers_count_too():
    given = options(tiles=0)
    given._Popart.set("numIOTiles", 64)
    executor, _ = trained(given, x=ACTIVE[0])
    assert executor._core.program.io_tiles == 64
