"""Check which settings of the lower layers are accepted, and what is logged about them."""

import logging
import re

import pytest
import torch

import popart
import poptorch
from poptorch.options.session import _ENUMERATIONS, _KEYS, check_session, popart_keys

VALUES = {
    "bool": [True],
    "uint64": [1],
    "floating point": [0.5],
    "string": ["text"],
    "set / vector": [["a", 1], {"a"}, ("a",), []],
    "map": [{"a": "b"}],
}


@pytest.fixture
def log_from():
    """A function that chooses the least level that is written, for one test."""
    before = poptorch.logger.level
    yield poptorch.logger.setLevel
    poptorch.logger.setLevel(before)


@pytest.mark.parametrize("kind", _KEYS)
def test_every_key_takes_values_of_its_kind_only(kind):
    for key in _KEYS[kind]:
        for other in VALUES:
            for value in VALUES[other]:
                if other == kind or (other, kind) == ("uint64", "floating point"):
                    check_session({key: value})
                else:
                    with pytest.raises(poptorch.Error, match=f"Unknown {other} option {key}"):
                        check_session({key: value})


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("asdf", True, "Unknown bool option asdf"),
        ("dotChecks", torch.empty(1), "Unknown value type Tensor for option dotChecks"),
        ("asdf", [1.5], "Unknown value type list for option asdf"),
        ("asdf", 3, "Unknown uint64 option asdf"),
        ("asdf", 0.5, "Unknown floating point option asdf"),
        ("asdf", ["a"], "Unknown set / vector option asdf"),
        ("asdf", {"a": "b"}, "Unknown map option asdf"),
        (
            "enableOutlining",
            "yes",
            "Unknown string option enableOutlining: its values are of kind bool",
        ),
    ],
)
def test_wrong_settings_are_taken_first_and_refused_by_the_compilation(key, value, text):
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    assert options._Popart.set(key, value) is options._Popart
    with pytest.raises(poptorch.Error, match=text):
        poptorch.poptorch_core._validateOptions(options.toDict())


@pytest.mark.parametrize("key", _ENUMERATIONS)
def test_an_enumeration_takes_the_numbers_of_its_members_only(key):
    name, numbers = _ENUMERATIONS[key]
    members = [int(member) for member in getattr(popart, name)]
    assert members == list(numbers)
    for number in members:
        check_session({key: number})
    for number in (-1, len(members)):
        with pytest.raises(poptorch.Error, match=f"Value for {name} out of range"):
            check_session({key: number})


def test_a_call_that_compiles_checks_every_setting():
    options = poptorch.Options().showCompilationProgressBar(False)
    options._Popart.set("asdf", True)
    executor = poptorch.inferenceModel(torch.nn.Linear(1, 1), options)
    with pytest.raises(poptorch.Error, match="Unknown bool option asdf"):
        executor(torch.ones(1, 1))
    assert not executor.isCompiled()


def test_a_call_that_compiles_logs_every_setting_once(capsys, log_from):
    options = poptorch.Options().showCompilationProgressBar(False).useIpuModel(True)
    executor = poptorch.inferenceModel(torch.nn.Linear(1, 1), options)
    log_from(logging.DEBUG)
    for _ in range(2):
        executor(torch.ones(1, 1))
    text = capsys.readouterr().err
    assert text.count("[debug] poptorch.Options set device_iterations to value 1") == 1
    assert text.count("From the user configuration: Ipu model: Enabled") == 1


def test_every_option_of_this_package_is_accepted_and_logged(capsys, log_from):
    options = poptorch.Options().outputMode(poptorch.OutputMode.All).deviceIterations(3)
    options.setExecutionStrategy(poptorch.SerialPhasedExecution("a")).modelName("m").useIpuId(1)
    options.useIpuModel(True).randomSeed(1).enableProfiling("p").useOfflineIpuTarget()
    options.setAvailableMemoryProportion({"IPU0": 0.5}).updatableNamedBuffers(["t"])
    options.Precision.setPartialsType(torch.half)
    options.TensorLocations.numIOTiles(32).setWeightLocation(poptorch.TensorLocationSettings())
    options._Popart.setPatterns({"PadSum": True})
    capsys.readouterr()
    log_from(logging.DEBUG)
    check_session(options.toDict())
    lines = re.findall(r"\[debug\] poptorch\.Options (.+)", capsys.readouterr().err)
    for expected in (
        "set device_iterations to value 3",
        "set execution_mode to value 2",
        "set serial_phases_execution to value true",
        "set engineOptions[autoReport.directory] to p",
        "set partialsTypeMatMuls to value half",
        "added t to updatableNamedBuffers",
    ):
        assert expected in lines


@pytest.mark.parametrize(
    ("chosen", "said"), [(True, ["Enabled"]), (False, ["Disabled"]), (None, [])]
)
def test_a_chosen_machine_is_logged(capsys, log_from, chosen, said):
    log_from(logging.INFO)
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    if chosen is not None:
        options.useIpuModel(chosen)
    check_session(options.toDict())
    text = capsys.readouterr().err
    assert re.findall(r"\[info\] From the user configuration: Ipu model: (\w+)", text) == said


def test_log_dir_of_the_lower_layers_points_to_ours(capsys):
    poptorch.Options()._Popart.set("logDir", "x")
    assert "use poptorch.Options.logDir()" in capsys.readouterr().err


def test_keys_are_the_lower_layers_own():
    assert len(popart_keys()) > 100
    assert not [key for key in popart_keys() if "_" in key]
