"""Check saving and loading of executors, and whom a file is trusted from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ipu_dynamo
import poptorch
from ipu_dynamo.saved.archive import Archive, write_archive
from poptorch.options import Options
from poptorch.saving import options_json
from poptorch.saving.trust import pickled, sign

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x, y):
        h = F.dropout(torch.relu(self.norm(self.first(x))), 0.2)
        scores = self.last(h)
        return {"scores": scores, "loss": F.cross_entropy(scores, y)}


X, Y = torch.arange(64.0).view(16, 4).sin(), torch.arange(16) % 3
OPTIMIZERS = [
    lambda model: poptorch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, use_combined_accum=True
    ),
    lambda model: poptorch.optim.AdamW(model.parameters(), lr=0.01, loss_scaling=4.0),
    lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
]


def options_of(**more):
    options = poptorch.Options().deviceIterations(2).randomSeed(3)
    options.showCompilationProgressBar(False)
    options.Training.gradientAccumulation(2)
    return options


def trained(optimizer=OPTIMIZERS[0], model=None, options=None):
    torch.manual_seed(0)
    model = model or Net()
    executor = poptorch.trainingModel(model, options or options_of(), optimizer(model))
    executor(X, Y)
    return executor


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "new" / "folder" / "model.poptorch")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_executor_goes_on_with_the_same_bits(path, optimizer):
    executor = trained(optimizer)
    executor.save(path)
    loaded = poptorch.load(path)
    for _ in range(2):
        same(loaded(X, Y), executor(X, Y))
    same(loaded.model.state_dict(), executor.model.state_dict())
    assert loaded.rng_state == executor.rng_state
    assert type(loaded.model).__bases__[0] is Net
    assert repr(loaded.options) == repr(executor.options)


def test_the_loaded_optimizer_is_that_of_the_model(path):
    executor = trained(OPTIMIZERS[1])
    executor.save(path)
    loaded = poptorch.load(path)
    optimizer = loaded._optimizer
    assert optimizer.param_groups[0]["params"][0] is next(loaded.model.parameters())
    optimizer.param_groups[0]["lr"] = 0.0
    loaded.setOptimizer(optimizer)
    before = {k: v.clone() for k, v in loaded.model.state_dict().items() if "norm" not in k}
    loaded(X, Y)
    same(before, {k: v for k, v in loaded.model.state_dict().items() if "norm" not in k})


def test_inference_and_functions(path):
    def double(x):
        return (2 * x, [x, None])

    model = nn.Linear(4, 2)
    executor = poptorch.inferenceModel(model)
    executor.compileAndExport(path, X)
    assert torch.equal(poptorch.load(path)(X), executor(X))
    executor = poptorch.inferenceModel(double)
    executor.compileAndExport(path, X, export_model=False)
    other = poptorch.inferenceModel(double)
    other.loadExecutable(path)
    found, (x, nothing) = other(X)
    assert torch.equal(found, 2 * X)
    assert torch.equal(x, X)
    assert nothing is None


def test_load_executable_keeps_the_weights_of_the_model(path):
    trained().save(path, export_model=False)
    model = Net()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    executor = poptorch.trainingModel(model, options_of(), OPTIMIZERS[0](model))
    executor.loadExecutable(path)
    assert executor.isCompiled()
    same(executor.model.state_dict(), weights)
    assert executor.rng_state == [3, 2]
    executor(X, Y)


def test_random_numbers_may_be_left_out(path):
    executor = trained()
    executor.save(path, save_rng_state=False)
    model = Net()
    other = poptorch.trainingModel(model, options_of(), OPTIMIZERS[0](model))
    other.loadExecutable(path)
    assert other.rng_state == [3, 0]


def test_another_model_is_refused(path):
    executor = poptorch.inferenceModel(nn.Linear(4, 2))
    executor.compileAndExport(path, X)
    other = poptorch.inferenceModel(nn.Linear(4, 3))
    with pytest.raises(poptorch.Error, match=r"weight of shape \[2, 4\], the model one of .*\[3"):
        other.loadExecutable(path)
    assert not other.isCompiled()
    assert other(X).shape == (16, 3)


def test_options_can_be_edited(path):
    trained().save(path)
    loaded = poptorch.load(path, lambda options: options.showCompilationProgressBar(True))
    assert loaded.compilationTime()


def test_never_becomes_always(path):
    options = options_of().connectionType(poptorch.ConnectionType.Never)
    model = Net()
    executor = poptorch.trainingModel(model, options, OPTIMIZERS[0](model))
    executor.compileAndExport(path, X, Y)
    loaded = poptorch.load(path)
    assert loaded.options.connection_type == poptorch.ConnectionType.Always
    loaded(X, Y)


def test_a_folder_gets_a_file(tmp_path):
    trained().save(str(tmp_path))
    assert os.listdir(tmp_path) == ["model.poptorch"]
    with pytest.raises(AssertionError, match="is not a folder"):
        trained().save(str(tmp_path / "model.poptorch" / "x"))


def test_nothing_compiled_cannot_be_saved(path):
    with pytest.raises(poptorch.Error, match="not been compiled"):
        poptorch.inferenceModel(nn.Linear(4, 2)).save(path)


def test_files_without_a_model_and_of_other_versions_are_refused(path, monkeypatch):
    executor = trained()
    executor.save(path, export_model=False)
    with pytest.raises(AssertionError, match=r"Invalid file .*loadExecutable"):
        poptorch.load(path)
    monkeypatch.setattr("poptorch.saving.files.__version__", "9.9")
    executor.save(path)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match=r"Invalid file .*: PopTorch version mismatch: 9\.9"):
        poptorch.load(path)
    with pytest.raises(poptorch.Error, match=r"Invalid file .*version mismatch"):
        executor.loadExecutable(path)
    Path(path).write_bytes(b"PK")
    with pytest.raises(AssertionError, match="Invalid file"):
        poptorch.load(path)
    with pytest.raises(poptorch.Error, match="Invalid file"):
        executor.loadExecutable(path)
    with pytest.raises(poptorch.Error, match="Invalid file"):
        poptorch.importPoptorchMetadataFromFile(path)


def test_metadata_is_json(path):
    trained().save(path)
    found = json.loads(poptorch.importPoptorchMetadataFromFile(path))
    assert found["poptorch"] == poptorch.__version__


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def foreign(path, tmp_path, monkeypatch):
    """A file whose module was exchanged for one that makes a folder, by who has no key."""
    trained().save(path)
    with Archive(path) as archive:
        members = {name: archive.read(name, 1 << 30) for name in archive.names}
        head = archive.head
    monkeypatch.setattr("poptorch.saving.trust._key", lambda *, make: b"x" * 32)
    members["poptorch/module"] = pickled((Canary(str(tmp_path / "canary")), None))
    head = {name: value for name, value in head.items() if name != "signature"}
    write_archive(path, members, head, sign)
    monkeypatch.undo()
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    return path


def test_a_module_of_others_is_not_read(foreign, tmp_path):
    with pytest.raises(poptorch.Error, match=r"IPU_DYNAMO_TRUST=1.*add_safe_globals"):
        poptorch.load(foreign)
    assert not (tmp_path / "canary").exists()
    model = Net()
    executor = poptorch.trainingModel(model, options_of(), OPTIMIZERS[0](model))
    executor.loadExecutable(foreign)
    assert not (tmp_path / "canary").exists()


def test_a_module_of_others_is_read_where_it_is_trusted(foreign, tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_TRUST", "1")
    with pytest.raises(TypeError, match="NoneType"):  # what `mkdir` returns is no model
        poptorch.load(foreign)
    assert (tmp_path / "canary").exists()


def test_allowed_classes_are_read(path, tmp_path, monkeypatch):
    model = nn.Linear(4, 2)
    executor = poptorch.inferenceModel(model)
    executor.compileAndExport(path, X)
    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", str(tmp_path / "others"))
    with pytest.raises(poptorch.Error, match="add_safe_globals"):
        poptorch.load(path)
    with torch.serialization.safe_globals([nn.Linear]):
        assert torch.equal(poptorch.load(path)(X), executor(X))


@pytest.mark.parametrize("mode", [0o644, 0o620])
def test_a_key_that_others_may_have_read_signs_nothing(path, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", str(tmp_path / "cache"))
    executor = poptorch.inferenceModel(nn.Linear(4, 2))
    executor.compileAndExport(path, X)
    poptorch.load(path)
    (tmp_path / "cache" / "signing_key").chmod(mode)
    with pytest.raises(poptorch.Error, match="IPU_DYNAMO_TRUST"):
        poptorch.load(path)


def test_the_core_names_who_reads_a_file(path):
    trained().save(path)
    with pytest.raises(ipu_dynamo.SavedProgramError, match=r"poptorch\.load reads it"):
        ipu_dynamo.load(path)


def test_another_process_loads_it(path):
    executor = poptorch.inferenceModel(nn.Linear(4, 2))
    executor.compileAndExport(path, X)
    program = (
        "import torch, poptorch, sys\n"
        "x = torch.arange(64.0).view(16, 4).sin()\n"
        "torch.save(poptorch.load(sys.argv[1])(x), sys.argv[1] + '.found')\n"
    )
    subprocess.run([sys.executable, "-c", program, path], cwd=ROOT, check=True, timeout=300)
    assert torch.equal(torch.load(f"{path}.found"), executor(X))


def strategies():
    stage = poptorch.Stage("a", "b").ipu(1)
    yield poptorch.PipelinedExecution()
    yield poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    yield poptorch.ShardedExecution(poptorch.Stage("c"), stage)
    phased = poptorch.SerialPhasedExecution(poptorch.Phase("a"), poptorch.Phase("b"))
    yield phased.useSeparateBackwardPhase().setTensorsLiveness(poptorch.Liveness.OffChipAfterFwd)
    yield poptorch.ParallelPhasedExecution(poptorch.Phase(poptorch.Stage("c"), stage))


@pytest.mark.parametrize("strategy", list(strategies()), ids=repr)
def test_options_come_back(strategy):
    options = options_of().setExecutionStrategy(strategy).useIpuId(3).replicationFactor(2)
    options.setAvailableMemoryProportion({"IPU0": 0.25})
    options.anchorTensor("a", "loss", poptorch.OutputMode.All)
    options._Popart.set("patterns_level", 2)
    options.TensorLocations.setWeightLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False)
    )
    options.Precision.setPartialsType(torch.half)
    options.outputMode(poptorch.OutputMode.Final)
    read = options_json.read_options(json.loads(json.dumps(options_json.write_options(options))))
    assert isinstance(read, Options)
    assert repr(read) == repr(options)
    assert read.toDict() == options.toDict()
    assert repr(read._execution_strategy) == repr(strategy)
    read.deviceIterations(5)


class LossInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, y=None):
        scores = self.layer(x)
        return (scores, F.cross_entropy(scores, y)) if self.training else scores


def test_an_inference_executor_saves_the_mode_of_its_own_model(tmp_path):
    """The user's module of an executor made from a training one goes on training."""
    model = LossInTraining()
    options = poptorch.Options().showCompilationProgressBar(False)
    training = poptorch.trainingModel(model, options)
    validation = poptorch.inferenceModel(training, options)
    validation.model.eval()
    training(X, Y)
    validation.compileAndExport(str(tmp_path / "validation"), X)
    assert model.training
    loaded = poptorch.load(str(tmp_path / "validation"))
    assert torch.equal(loaded(X), validation(X))
