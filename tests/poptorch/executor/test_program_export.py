"""Check what is written of a compiled program: to a file, to the log, and as JSON."""

import gzip
import json

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.program import Program
from tests.poptorch.executor.models import Classifier, batch


def compiled(options=None):
    executor = poptorch.inferenceModel(nn.Linear(4, 4), options)
    executor.compile(torch.ones(2, 4))
    return executor


def test_the_environment_names_a_file_for_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(tmp_path / "new" / "file.txt"))
    program = compiled()._core.program
    text = (tmp_path / "new" / "file.txt").read_text()
    assert Program.parse(text).text() == program.text()


def test_a_folder_gets_a_file_and_binary_is_compressed(tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(tmp_path / "folder"))
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_AS_BINARY", "1")
    program = compiled()._core.program
    data = (tmp_path / "folder" / "model.proto").read_bytes()
    assert gzip.decompress(data).decode() == program.text()


@pytest.mark.parametrize(("most", "lines"), [("2", 3), ("0", None), (None, 11)])
def test_the_log_has_the_first_lines_at_level_trace(monkeypatch, tmp_path, capfd, most, lines):
    monkeypatch.chdir(tmp_path)
    if most is not None:
        monkeypatch.setenv("POPTORCH_MAX_GRAPH_LEN", most)
    poptorch.setLogLevel("TRACE")
    try:
        executor = compiled()
    finally:
        poptorch.setLogLevel("WARN")
    whole = str(executor._core.program).splitlines()
    logged = capfd.readouterr().err.partition(f"[trace] {whole[0]}")
    assert logged[1]
    rest = logged[2].splitlines()
    if lines is None:
        assert rest[1 : len(whole)] == whole[1:]
    else:
        assert rest[1 : lines - 1] == whole[1 : lines - 1]
        assert "more lines (POPTORCH_MAX_GRAPH_LEN)" in rest[lines - 1]


def test_a_number_of_lines_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", "unused.txt")
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_AS_BINARY", "yes")
    with pytest.raises(poptorch.Error, match="AS_BINARY must be an integer, got 'yes'"):
        compiled()


def test_json_lists_operators_instructions_and_stashes():
    options = poptorch.Options().deviceIterations(1)
    options.Training.gradientAccumulation(3)
    model = Classifier(second=1)
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        executor._debugGetPopartIR()
    executor.compile(*batch(6))
    nodes = json.loads(executor._debugGetPopartIR())["maingraph"]
    kinds = [node["type"] for node in nodes]
    assert {"addmm", "relu", "mm", "Stash", "Update"} <= set(kinds)
    assert {node["ipu"] for node in nodes if node["type"] == "addmm"} == {0, 1}
    assert all(node["name"] for node in nodes)


def test_log_levels_that_ask_for_programs_write_them_into_the_folder_of_logs(tmp_path):
    folder = tmp_path / "new" / "folder"
    options = poptorch.Options().logDir(str(folder)).showCompilationProgressBar(False)
    poptorch.setLogLevel("DEBUG_IR")
    try:
        executors = [compiled(options), compiled(options)]
    finally:
        poptorch.setLogLevel("WARN")
    compiled(options)  # nobody asks any more
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["Linear_inference_0.txt", "Linear_inference_1.txt"]
    for file, executor in zip(files, executors, strict=True):
        text = file.read_text()
        assert text.startswith(f"{executor._core.program}\n")
        assert text.endswith(f"{executor._core.executable.host_program}\n")
