"""Check `ipu-dynamo`: every kind of input, the files that it writes, and its exit codes."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ipu_dynamo
import poptorch
from ipu_dynamo.command import predict_command
from ipu_dynamo.command.subcommands import main
from ipu_dynamo.machine.prediction import VERSION, Prediction
from tests.report.predictions import drawn_prediction

COMMANDS = ("predict", "report", "trace")
FUNCTIONS = """
    import torch
    import ipu_dynamo

    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU()).to("meta")
    x = torch.empty(4, 16, device="meta")

    class Holder:
        def inference():
            return model, x

    def training():
        return ipu_dynamo.compile_training(
            Loss(), torch.optim.SGD(model.parameters(), lr=0.1)
        ), x

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return torch.nn.functional.mse_loss(self.model(x), x[:, :8])

    def program():
        return ipu_dynamo.programs()[-1]

    def wrong():
        raise KeyError("no model here")

    def alone():
        return model

    def narrow():
        return model, torch.empty(4, 3, device="meta")
"""


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x):
        return nn.functional.mse_loss(self.layer(x), x[:, :8])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A training program as each kind of file."""
    folder = tmp_path_factory.mktemp("programs")
    model = Loss()
    options = ipu_dynamo.Options(engine="eager")
    step = ipu_dynamo.compile_training(model, torch.optim.SGD(model.parameters(), 0.1), options)
    step(torch.zeros(4, 16))
    (folder / "program.txt").write_text(step.program.text())
    ipu_dynamo.save(step, folder / "saved.ipu")
    check = ipu_dynamo.compile_inference(model, options)
    check(torch.zeros(4, 16))
    ipu_dynamo.save({"train": step, "check": check}, folder / "both.ipu")
    (folder / "prediction.json").write_bytes(ipu_dynamo.predict(step.program).to_json())
    (folder / "functions.py").write_text(textwrap.dedent(FUNCTIONS))
    return folder


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """The exit code, output and errors of the command, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")

    def call(*arguments):
        code = main(list(map(str, arguments)))
        return code, *capsys.readouterr()

    return call


def written(folder, subcommand):
    """The file that a subcommand wrote."""
    name = {"report": "report.html", "trace": "trace.json"}[subcommand]
    return (folder / name).read_text()


@pytest.mark.parametrize("name", ["program.txt", "saved.ipu", "prediction.json"])
@pytest.mark.parametrize("subcommand", COMMANDS)
def test_every_file_is_read_by_every_subcommand(files, run, tmp_path, subcommand, name):
    code, out, err = run(subcommand, files / name, "--json", "out.json")
    assert (code, err) == (0, "")
    prediction = Prediction.from_json((tmp_path / "out.json").read_bytes())
    expected = Prediction.from_json((files / "prediction.json").read_bytes())
    same = replace(prediction, model=expected.model, reproduce=expected.reproduce)
    assert same == expected
    if subcommand == "predict":
        assert out == f"{prediction}\n"
    elif subcommand == "report":
        assert out == "report.html\n"
        assert written(tmp_path, subcommand).startswith("<!DOCTYPE html>")
    else:
        assert json.loads(written(tmp_path, subcommand))["otherData"]["model"] == prediction.model


@pytest.mark.parametrize("subcommand", COMMANDS)
@pytest.mark.parametrize(
    ("function", "kind"), [("Holder.inference", "inference"), ("training", "training")]
)
def test_a_function_gives_a_model_with_its_arguments(
    files, run, tmp_path, monkeypatch, subcommand, function, kind
):
    monkeypatch.chdir(files)  # as for `python -m`, modules there are found
    json_file = tmp_path / "out.json"
    output = tmp_path / "output"
    code, _, err = run(subcommand, f"functions:{function}", "--json", json_file, "-o", output)
    assert (code, err) == (0, "")
    assert output.stat().st_size > 0
    assert Prediction.from_json(json_file.read_bytes()).kind == kind


def test_a_function_may_give_a_program(files, run, monkeypatch):
    monkeypatch.chdir(files)
    step = ipu_dynamo.compile_inference(nn.Linear(4, 4), ipu_dynamo.Options(engine="eager"))
    step(torch.zeros(2, 4))
    code, out, err = run("predict", "functions:program")
    assert (code, err) == (0, "")
    assert "fits" in out


def test_the_command_in_a_prediction_makes_it_again(files, run, tmp_path):
    run("predict", files / "program.txt", "--machine", "mk2", "--json", "first.json")
    first = Prediction.from_json((tmp_path / "first.json").read_bytes())
    name, *arguments = first.reproduce.command.split()
    assert (name, first.system) == ("ipu-dynamo", "mk2")
    run(*arguments, "--json", "second.json")
    assert Prediction.from_json((tmp_path / "second.json").read_bytes()) == first


def test_without_a_machine_the_environment_names_it(files, run, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_MACHINE", "mk1")
    assert " on mk1 " in run("predict", files / "program.txt")[1]
    assert " on c600 " in run("predict", files / "program.txt", "--machine", "c600")[1]
    monkeypatch.delenv("IPU_DYNAMO_MACHINE")
    assert " on bow " in run("predict", files / "program.txt")[1]


def test_an_entry_point_is_chosen_by_name(files, run):
    code, _, err = run("predict", files / "both.ipu")
    assert code == 2
    assert "--entry: check, train" in err
    outs = [run("predict", files / "both.ipu", "--entry", name)[1] for name in ("check", "train")]
    assert outs[0].splitlines()[1].startswith("call ")
    assert outs[1].splitlines()[1].startswith("step ")


def test_what_poptorch_saved_is_read(run):
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    model = poptorch.inferenceModel(nn.Linear(4, 4), options)
    model.compile(torch.zeros(2, 4))
    model.save("model.poptorch")
    code, out, err = run("predict", "model.poptorch")
    assert (code, err) == (0, "")
    assert out.startswith("model on bow fits: ")


@pytest.mark.parametrize(("used", "code"), [(0.5, 0), (0.85, 0), (1.3, 1)])
@pytest.mark.parametrize("subcommand", COMMANDS)
def test_the_exit_code_says_whether_it_fits(run, tmp_path, subcommand, used, code):
    prediction = drawn_prediction(used=used)
    assert prediction.verdict.word == {0.5: "fits", 0.85: "tight", 1.3: "does not fit"}[used]
    (tmp_path / "p.json").write_bytes(prediction.to_json())
    assert run(subcommand, "p.json")[0] == code


BROKEN = {
    "missing": None,
    "empty": b"",
    "a line": b"hello\n",
    "bytes": bytes(range(128, 256)),
    "a zip": b"PK\x03\x04 and nothing",
    "braces": b"{" * 100_000,
    "no prediction": b'{"version": 1}',
    "a future prediction": b'{"version": %d}' % (VERSION + 1),
    "a future program": b"ipu_dynamo program, version 999999\n",
    "python.py": b"import torch\n",
    "evil:main": b"ipu_dynamo program, version 1\n__import__('os').system('false')\n",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("subcommand", COMMANDS)
def test_an_unusable_file_is_refused_in_one_line(run, tmp_path, monkeypatch, subcommand, name):
    monkeypatch.setattr(predict_command, "import_module", pytest.fail)
    if BROKEN[name] is not None:
        (tmp_path / name).write_bytes(BROKEN[name])
    code, out, err = run(subcommand, name, "-o", "output")
    assert (code, out) == (2, "")
    assert err.startswith("ipu-dynamo: ")
    assert err.count("\n") == 1
    assert name in err
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("functions:wrong", "KeyError: 'no model here'"),
        ("functions:missing", "AttributeError: "),
        ("no_such_module:model", "ModuleNotFoundError: "),
        ("functions:x.shape.numel", "int is no model and no program"),
        ("functions:alone", "returned Sequential without arguments: return a tuple of the model"),
        ("functions:narrow", "functions:narrow: RuntimeError: "),
    ],
)
def test_an_unusable_function_is_refused_in_one_line(files, run, monkeypatch, what, problem):
    monkeypatch.chdir(files)
    code, out, err = run("predict", what)
    assert (code, out) == (2, "")
    assert problem in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("what", ["functions.py", "functions.alone", "."])
def test_what_is_no_program_says_what_to_give(files, run, monkeypatch, what):
    monkeypatch.chdir(files)
    code, out, err = run("predict", what)
    assert (code, out) == (2, "")
    assert what in err
    assert "module:function of Python code" in err


def test_subcommands_of_the_other_command_name_it(run, capsys):
    with pytest.raises(SystemExit):
        run("convert", "--dir", "d")
    assert "ipu-saved-model convert" in capsys.readouterr().err


def test_a_damaged_file_is_refused(files, run, tmp_path):
    for name in ("program.txt", "saved.ipu", "prediction.json"):
        content = (files / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        code, out, err = run("predict", name)
        assert (code, out) == (2, "")
        assert err.startswith("ipu-dynamo: ")
        assert err.count("\n") == 1


def test_an_unknown_machine_and_a_second_one_are_refused(files, run):
    code, _, err = run("predict", files / "program.txt", "--machine", "bow-pod17")
    assert code == 2
    assert "bow-pod17" in err
    code, _, err = run("predict", files / "prediction.json", "--machine", "mk2")
    assert code == 2
    assert "--machine" in err


def test_an_output_that_cannot_be_written_is_named(files, run):
    code, _, err = run("report", files / "prediction.json", "-o", "missing/report.html")
    assert code == 2
    assert "missing" in err


@pytest.mark.parametrize(
    "arguments", [[], ["predict"], ["compare", "a"], ["report", "--mach", "a"]]
)
def test_wrong_usage_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: ipu-dynamo" in capsys.readouterr().err


def test_the_installed_command_prints_the_page(files):
    installed = Path(sys.executable).with_name("ipu-dynamo")
    if not installed.exists():
        pytest.skip("ipu_dynamo was installed before it had this command")
    done = subprocess.run(
        [installed, "predict", files / "prediction.json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{Prediction.from_json((files / 'prediction.json').read_bytes())}\n"
