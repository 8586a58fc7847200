"""Check options from JSON, from files and from the environment."""

import json

import pytest

import poptorch
from poptorch import enums


def test_json_calls_setters():
    text = json.dumps(
        {
            "deviceIterations": 2,
            "Precision.enableFloatingPointExceptions": True,
            "_Popart.set": ["saveInitializersToFile", "f.onnx"],
            "connectionType": "ConnectionType.OnDemand",
            "outputMode": ["OutputMode.EveryN", 2],
            "logDir": "ConnectionType.Sometimes",
            "modelName": "a.b",
        }
    )
    options = poptorch.Options()
    assert options.from_json(string=text) is options
    expected = poptorch.Options().deviceIterations(2)
    expected.Precision.enableFloatingPointExceptions(True)
    expected._Popart.set("saveInitializersToFile", "f.onnx")
    expected.connectionType(enums.ConnectionType.OnDemand)
    expected.outputMode(enums.OutputMode.EveryN, 2)
    expected.logDir("ConnectionType.Sometimes").modelName("a.b")
    assert repr(options) == repr(expected)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", poptorch.Error, "no valid JSON"),
        ("[1]", poptorch.Error, "JSON object"),
        ('{"device_iterations": 2}', poptorch.Error, "a value and no setter"),
        ('{"deviceIteration": 2}', AttributeError, "Invalid attribute deviceIteration"),
        ('{"deviceIterations": "2"}', AssertionError, "Unexpected type"),
    ],
)
def test_wrong_json_is_refused(text, error, message):
    with pytest.raises(error, match=message):
        poptorch.Options().from_json(text)


def test_the_environment_sets_defaults(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "cache")
    assert poptorch.Options()._Popart.options["cachePath"] == "cache"
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"enableExecutableCaching": "other"}')
    options = poptorch.Options()
    assert options._Popart.options["cachePath"] == "other"
    assert options._Popart.options["enableEngineCaching"] is True
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", "")
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "")
    assert "cachePath" not in poptorch.Options()._Popart.options


FILE = """
deviceIterations(1)
  replicationFactor(2)

# a comment
Training.gradientAccumulation(3) # and another
setExecutionStrategy(poptorch.ShardedExecution())
"""


def test_a_file_is_executed_on_top_of_what_is_set(tmp_path):
    path = tmp_path / "run.conf"
    path.write_text(FILE)
    options = poptorch.Options().deviceIterations(5).modelName("kept")
    assert options.loadFromFile(filepath=str(path)) is options
    assert (options.device_iterations, options.replication_factor) == (1, 2)
    assert options.Training.gradient_accumulation == 3
    assert isinstance(options._execution_strategy, poptorch.ShardedExecution)
    assert options.model_name == "kept"
    path.write_text("deviceIterations(4)")
    assert options.loadFromFile(path).device_iterations == 4
    assert options.replication_factor == 2


@pytest.mark.parametrize("line", ["outputMode(poptorch.OutputMode.All", "deviceIterations 4"])
def test_a_syntax_error_names_its_line_and_nothing_is_executed(tmp_path, line):
    path = tmp_path / "run.conf"
    path.write_text(f"{FILE}{line}\nreplicationFactor(8)")
    options = poptorch.Options()
    with pytest.raises(poptorch.ConfigFileError) as caught:
        options.loadFromFile(path)
    first, second = str(caught.value).split("\n")
    assert first.startswith("SyntaxError at line 8 of run.conf: ")
    assert second == f"> options.{line}"
    assert repr(options) == repr(poptorch.Options())
    assert poptorch.options.ConfigFileError is poptorch.ConfigFileError


@pytest.mark.parametrize(
    ("line", "error"), [("noSuchOption(1)", AttributeError), ("deviceIterations(x)", NameError)]
)
def test_other_errors_of_a_line_come_out_unchanged_with_the_line(tmp_path, line, error):
    path = tmp_path / "run.conf"
    path.write_text(f"deviceIterations(2)\n\n{line}")
    with pytest.raises(error) as caught:
        poptorch.Options().loadFromFile(path)
    assert f"in line 3 of run.conf: {line}" in caught.value.__notes__
