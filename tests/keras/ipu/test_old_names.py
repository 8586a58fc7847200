"""Check the names that old Keras programs import, and what is not offered."""

import importlib
import subprocess
import sys
import types
from pathlib import Path

import keras
import pytest

import ipu_dynamo.keras
from ipu_dynamo.keras import check_keras, ipu, old_names
from ipu_dynamo.keras.ipu.not_offered import TODAY

OFFERED = {
    "config": ["IPUConfig", "configure_ipu_system", "get_ipu_config", "reset_ipu_configuration"],
    "utils": ["configure_ipu_system", "get_ipu_config"],
    "ipu_strategy": ["IPUStrategy", "IPUStrategyV1"],
    "ops.pipelining_ops": ["PipelineSchedule", "RecomputationMode"],
    "pipelining_ops": ["PipelineSchedule", "RecomputationMode"],
    "gradient_accumulation": ["GradientAccumulationReductionMethod"],
    "serving": ["export_keras"],
}
ENUMERATIONS = [
    "SelectionOrder",
    "ExecutionProfileType",
    "DeviceConnectionType",
    "MergeRemoteBuffersBehaviour",
    "SchedulingAlgorithm",
    "StochasticRoundingBehaviour",
]


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in OFFERED.items() for name in names]
    + [(module, name) for module in ("config", "utils") for name in ENUMERATIONS],
)
def test_a_name_of_the_namespace_is_there(module, name):
    for part in [*module.split("."), name]:
        value = getattr(ipu if part == module.split(".")[0] else value, part)  # noqa: F821
    assert value is not None


def test_the_modules_can_be_imported():
    for module in OFFERED:
        if module != "pipelining_ops":  # an attribute only, as it was
            importlib.import_module(f"ipu_dynamo.keras.ipu.{module}")


@pytest.mark.parametrize(
    "module", ["", "config", "utils", "ops", "ops.pipelining_ops", "gradient_accumulation"]
)
def test_another_name_is_said_not_to_be_offered(module):
    value = importlib.import_module("ipu_dynamo.keras.ipu" + (f".{module}" if module else ""))
    with pytest.raises(AttributeError, match=r"ipu[\w.]*\.embedding_ops is not offered here"):
        _ = value.embedding_ops
    assert not hasattr(value, "__wrapped__")


@pytest.mark.parametrize("path", TODAY)
def test_an_old_name_says_what_to_write_today(path):
    *modules, name = path.split(".")
    value = ipu
    for module in modules:
        value = getattr(value, module)
    with pytest.raises(AttributeError) as error:
        getattr(value, name)
    assert str(error.value).endswith(f"Write today: {TODAY[path]}")
    guide = (Path(__file__).parents[3] / "docs/keras_models.md").read_text()
    assert f"| `ipu.{path}` | {TODAY[path]} |" in guide


def test_reset_was_in_config_only():
    assert not hasattr(ipu.utils, "reset_ipu_configuration")


def test_keras_ipu_is_the_package():
    import keras.ipu
    import keras.ipu.extensions
    from keras.ipu import extensions

    assert keras.ipu is ipu_dynamo.keras
    assert keras.ipu.extensions is extensions is ipu_dynamo.keras.extensions
    assert keras.ipu.PipelineStage is extensions.PipelineStage
    for name in ("FunctionalExtension", "ModelExtension", "SequentialExtension"):
        assert hasattr(extensions, name)
    for kind in ("Functional", "Model", "Sequential"):
        assert hasattr(extensions, f"{kind}LayerPipelineStageAssignment")


def test_a_foreign_keras_ipu_stays(monkeypatch):
    foreign = types.ModuleType("keras.ipu")
    monkeypatch.setitem(sys.modules, "keras.ipu", foreign)
    monkeypatch.setattr(keras, "ipu", foreign, raising=False)
    with pytest.warns(UserWarning, match=r"keras\.ipu already, and it stays"):
        old_names.name_in_keras()
    assert sys.modules["keras.ipu"] is keras.ipu is foreign


def test_a_missing_keras_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(ImportError, match=r"pip install '.\[keras\]'"):
        check_keras.check()


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match=r"needs the torch backend of Keras.*runs on jax"):
        check_keras.check()


def test_another_minor_version_is_warned_of(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.16.0")
    with pytest.warns(UserWarning, match=r"Keras 3\.15, and this is Keras 3\.16\.0"):
        check_keras.check()


def test_the_core_imports_no_keras_and_the_package_chooses_torch():
    program = (
        "import sys, os, ipu_dynamo; assert 'keras' not in sys.modules; "
        "os.environ.pop('KERAS_BACKEND', None); import ipu_dynamo.keras, keras; "
        "assert keras.config.backend() == 'torch'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
