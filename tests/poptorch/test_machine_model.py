"""Check what PopTorch programs are told of an IPU's cycles and memory, which are predicted."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.errors import OptionError
from ipu_dynamo.machine import machines
from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.machine.prediction import Prediction


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')
    for name in ("IPU_DYNAMO_MACHINE", "POPLAR_ENGINE_OPTIONS", "POPTORCH_SMALL_IPU_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


class Net(nn.Module):
    """Two stages, with a convolution, a product and a loss."""

    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Linear(8 * 16 * 16, width)

    def forward(self, image, label=None):
        with poptorch.Block("first", ipu_id=0):
            hidden = self.first(image).relu()
        with poptorch.Block("second", ipu_id=1):
            out = self.second(hidden.flatten(1))
            if label is None:
                return out
            return out, nn.functional.cross_entropy(out, label)


class Scarce(Net):
    """The same with little memory for the product."""

    def forward(self, image):
        return poptorch.set_available_memory(super().forward(image), 0.01)


class Grouped(nn.Module):
    """Two convolutions that are planned together, with a share of memory."""

    def __init__(self, share):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(256, 512, 3, padding=1) for _ in range(2)])
        self.share = share

    def forward(self, image):
        with poptorch.MultiConv().availableMemoryProportions(self.share):
            return [layer(image) for layer in self.layers]


def inference():
    """Options for a pipeline of two stages."""
    return poptorch.Options().deviceIterations(2)


def cycles(model, image, options=None):
    options = (options or inference()).logCycleCount(True)
    executor = poptorch.inferenceModel(model, options)
    executor(image)
    return executor.cycleCount()


def images(rows=2):
    return torch.randn(rows, 3, 16, 16)


def trained_cycles(change=lambda options: None, rows=1):
    options = poptorch.Options().logCycleCount(True)
    options.Training.gradientAccumulation(4)
    change(options)
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options, optimizer)
    executor(images(4 * rows), torch.randint(64, (4 * rows,)))
    return executor.cycleCount()


def test_cycles_are_asked_for_and_of_a_program_that_ran():
    silent = poptorch.inferenceModel(Net())
    with pytest.raises(poptorch.Error, match="Please set option logCycleCount to True to enable"):
        silent.cycleCount()
    executor = poptorch.inferenceModel(Net(), inference().logCycleCount(True))
    problem = "Please run the model at least once before obtaining cycle count"
    with pytest.raises(poptorch.Error, match=problem):
        executor.cycleCount()
    executor.compile(images())
    with pytest.raises(poptorch.Error, match=problem):
        executor.cycleCount()
    executor(images())
    first = executor.cycleCount()
    assert type(first) is int
    assert first > 0
    executor(images())
    assert executor.cycleCount() == first
    executor.destroy()
    executor.compile(images())
    with pytest.raises(poptorch.Error, match=problem):
        executor.cycleCount()


@pytest.mark.slow
def test_cycles_do_not_depend_on_the_engine(monkeypatch):
    eager = trained_cycles()
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "inductor")
    assert trained_cycles() == eager


def test_more_work_takes_more_cycles():
    assert cycles(Net(64), images()) < cycles(Net(4096), images())
    assert cycles(Net(), images(4)) < cycles(Net(), images(256))


def test_cycles_are_logged_after_each_call_at_level_debug(capfd):
    executor = poptorch.inferenceModel(Net(), inference().logCycleCount(True))
    executor(images())
    poptorch.setLogLevel("DEBUG")
    try:
        capfd.readouterr()
        executor(images())
        executor(images())
    finally:
        poptorch.setLogLevel("WARN")
    shown = re.findall(r"Total number of IPU cycles: (\d+)", capfd.readouterr().err)
    assert shown == [str(executor.cycleCount())] * 2


def test_the_machine_is_that_of_the_environment_or_of_the_generation(monkeypatch):
    bow = cycles(Net(), images())
    of = {}
    for version in ("ipu1", "ipu21"):
        monkeypatch.setenv("POPTORCH_IPU_MODEL_VERSION", version)
        of[version] = cycles(Net(), images())
    assert len({bow, *of.values()}) == 3
    monkeypatch.setenv("IPU_DYNAMO_MACHINE", "bow")
    assert cycles(Net(), images()) == bow
    monkeypatch.setenv("IPU_DYNAMO_MACHINE", "mk1")
    assert cycles(Net(), images()) == of["ipu1"]
    monkeypatch.setenv("IPU_DYNAMO_MACHINE", "abacus")
    with pytest.raises(OptionError, match="no machine is named 'abacus'"):
        cycles(Net(), images())


def test_a_small_model_has_four_tiles(monkeypatch):
    large = cycles(Net(), images())
    monkeypatch.setenv("POPTORCH_SMALL_IPU_MODEL", "1")
    assert cycles(Net(), images()) > 2 * large
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    assert cycles(Net(), images()) == large


def test_shares_of_memory_move_cycles():
    plenty = cycles(Net(4096), images(256))
    options = inference().setAvailableMemoryProportion({"IPU0": 0.01, "IPU1": 0.01})
    assert cycles(Net(4096), images(256), options) > plenty
    assert cycles(Scarce(4096), images(256)) > plenty
    image = torch.randn(8, 256, 32, 32)
    assert cycles(Grouped(0.001), image) > cycles(Grouped(0.9), image)


def test_who_waits_for_the_host_moves_cycles():
    full, single = (
        trained_cycles(lambda options, pattern=pattern: options.syncPattern(pattern), rows=64)
        for pattern in (poptorch.SyncPattern.Full, poptorch.SyncPattern.SinglePipeline)
    )
    assert single < full


@pytest.mark.parametrize("setter", ["useIOTilesToLoad", "useIOTilesToStore"])
def test_io_tiles_of_loads_and_stores_move_cycles(setter):
    def change(options, through):
        away = poptorch.TensorLocationSettings().useOnChipStorage(False).minElementsForOffChip(0)
        getattr(away, setter)(through)
        options.TensorLocations.numIOTiles(32).setOptimizerLocation(away)

    through = trained_cycles(lambda options: change(options, True))
    assert through < trained_cycles(lambda options: change(options, False))


@pytest.fixture
def compiled(tmp_path):
    """Compile a model with options, and return the files of the working folder."""

    def run(options):
        poptorch.inferenceModel(Net(), options).compile(images())
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(tmp_path)) for path in files)

    return run


def test_profiling_writes_the_prediction_and_its_report(compiled, tmp_path):
    options = inference().enableProfiling("p")
    assert compiled(options) == ["p/inference/profile.json", "p/inference/report.html"]
    found = Prediction.from_json((tmp_path / "p/inference/profile.json").read_bytes())
    assert any("relu" in row.line for row in found.operators)
    assert "self.first" in (tmp_path / "p/inference/report.html").read_text()
    assert "p/net/profile.json" in compiled(inference().enableProfiling("p").modelName("net"))


def test_the_environment_goes_before_profiling(compiled, monkeypatch):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.directory": "there"}')
    options = inference().enableProfiling("here")
    there = ["there/inference/profile.json", "there/inference/report.html"]
    assert compiled(options) == there
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "false"}')
    assert compiled(inference().enableProfiling("elsewhere")) == there
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", "[]")
    with pytest.raises(poptorch.Error, match="POPLAR_ENGINE_OPTIONS must be a JSON object"):
        compiled(inference())


def test_the_environment_alone_asks_for_a_report(compiled, monkeypatch):
    assert compiled(inference()) == []
    text = '{"autoReport.all": "true", "autoReport.directory": "./r"}'
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", text)
    assert compiled(inference()) == ["r/inference/profile.json", "r/inference/report.html"]


def test_a_report_without_debug_information_has_no_lines(compiled, tmp_path):
    options = inference()
    options._Popart.setEngineOptions({"autoReport.outputGraphProfile": "true"})
    assert len(compiled(options)) == 2
    found = Prediction.from_json((tmp_path / "inference/profile.json").read_bytes())
    assert {row.line for row in found.operators} == {""}
    assert set(found.modules) == {""}
    assert "self.first" not in (tmp_path / "inference/report.html").read_text()


def test_a_program_that_does_not_fit_is_an_error_or_a_warning_after_its_report(
    compiled, monkeypatch, capfd
):
    small = replace(machines["bow"].ipu, tile_bytes=Figure(4096, "B", "M", "this test"))
    monkeypatch.setitem(machines, "small", replace(machines["bow"], name="small", ipu=small))
    monkeypatch.setenv("IPU_DYNAMO_ENFORCE_MEMORY", "small")
    with pytest.raises(poptorch.Error, match="does not fit on small"):
        compiled(inference())
    assert "does not fit on small" not in capfd.readouterr().err
    assert len(compiled(inference().enableProfiling("p"))) == 2
    assert "does not fit on small" in capfd.readouterr().err
