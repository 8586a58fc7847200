"""Check what the command prints and writes, and how it ends."""

import io
import json
import os
import pickle
import re
import warnings

import numpy as np
import pytest
import torch

from ipu_dynamo.saved_model import load, save
from ipu_dynamo.saved_model.command.main import main
from tests.saved_model import prepared_processes
from tests.saved_model.prepared_processes import errors_of, run_command
from tests.saved_model.programs import branches, command, exported, packed

SERVE = ("--tag_set", "serve", "--signature_def", "serving_default")
CONVERSION = ("convert", "--dir", "x", "--output_dir", "y", "--tag_set", "z")
ONES = "x=np.ones((2, 4));y=np.zeros((2, 4), dtype=np.float32)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("command") / "program"
    save(path, {"serving_default": exported(), "other": exported()}, tags=("serve",))
    return str(path)


@pytest.fixture
def run(capsys):
    """The exit status, output and errors of a command in this process."""

    def call(*arguments):
        try:
            status = main(list(map(str, arguments)))
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


def refused(result, problem):
    status, out, err = result
    *_, last = err.splitlines()
    assert (status, out) == (1, "")
    assert last.startswith("error: ")
    assert re.search(problem, last)
    assert "Traceback" not in err


def test_processes_end_as_the_command_says(folder, tmp_path):
    done = command("show", "--dir", folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tag_set: serve\n", "")
    output = tmp_path / "output"
    arguments = ["show", "--dir", f"{folder}-none"]
    assert prepared_processes.run(run_command, arguments, output=output) == 1
    assert output.read_text() == ""
    assert errors_of(output) == (
        f"error: no saved program found in {folder}-none: it does not exist\n"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "too few arguments"),
        (("show",), "--dir"),
        (("run", "--dir", "x"), "--tag_set"),
        (("show", "--dir", "x", "--unknown"), "--unknown"),
        (("show", "--dir", "x", "--all", "--json"), "exclude each other"),
        (("show", "--dir", "x", "--nodes"), "--nodes needs"),
        (("show", "--dir", "x", "--list_ops"), "--list_ops needs"),
        (("show", "--dir", "x", "--signature_def", "y"), "needs --tag_set"),
        (("convert", "--dir", "x"), "--output_dir"),
        ((*CONVERSION, "ipu", "--num_ipu", "2"), "did you mean --num_ipus"),
        (
            (*CONVERSION, "ipu", "--signature_def", "s"),
            "--signature_def belongs directly after convert or run or show",
        ),
        (
            (*CONVERSION, "ipu", "--dir", "d"),
            "--dir belongs directly after show, run or convert",
        ),
        (("freeze", "--dir", "x"), "invalid choice"),
    ],
)
def test_wrong_usage_ends_with_2(run, arguments, problem):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert problem in err


def test_show_lists_what_is_there(run, folder):
    def shown(*arguments):
        status, out, _ = run("show", "--dir", folder, "--json", *arguments)
        assert status == 0
        return json.loads(out)

    assert shown() == [["serve"]]
    assert shown("--tag_set", "serve") == ["other", "serving_default"]
    signature = shown(*SERVE)
    assert signature["inputs"]["x"] == {"position": 0, "dtype": "float32", "shape": [None, 4]}
    assert list(signature["outputs"]) == ["low", "both", "left"]
    nodes = {node["name"]: node for node in shown(*SERVE, "--nodes")}
    assert nodes["left/0/linear_1"] == {
        "name": "left/0/linear_1",
        "fx_name": "linear_2",
        "op": "aten.linear.default",
        "kind": "op",
        "dtype": "float32",
        "shape": [None, 8],
        "device": "host",
        "ipu": None,
        "stage": None,
    }
    assert nodes["x"]["kind"] == "input"
    assert nodes["left/0/weight"]["kind"] == "param"
    operators = shown("--tag_set", "serve", "--list_ops")
    assert operators == shown(*SERVE, "--list_ops") == sorted(operators)
    assert {"aten.linear.default", "aten.split.Tensor"} < set(operators)


def test_show_prints_lines(run, folder):
    _, out, _ = run("show", "--dir", folder, "--all")
    assert "    output low: float32 [?, 4]  node split\n" in out
    _, out, _ = run("show", "--dir", folder, *SERVE, "--nodes")
    assert "left/0/linear  linear  aten.linear.default  float32 [?, 8]  host\n" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--tag_set", "gpu"), "available are serve"),
        (
            ("--tag_set", "serve", "--signature_def", "q"),
            "available are 'other', 'serving_default'",
        ),
    ],
)
def test_show_says_what_is_available(run, folder, arguments, problem):
    refused(run("show", "--dir", folder, *arguments), problem)


def test_run_prints_and_writes_results(run, folder, tmp_path):
    x, y = np.random.randn(2, 3, 4).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "both.npz", x=x, y=y)
    outdir = tmp_path / "results" / "here"
    inputs = f"x={tmp_path}/x.npy;y={tmp_path}/both.npz[y]"
    arguments = ("run", "--dir", folder, *SERVE, "--inputs", inputs, "--outdir", outdir)
    status, out, _ = run(*arguments)
    assert status == 0
    assert out.index("key both:") < out.index("key left:") < out.index("key low:")
    expected = branches()(torch.tensor(x), torch.tensor(y))
    for name, value in expected.items():
        np.testing.assert_array_equal(np.load(outdir / f"{name}.npy"), value.detach().numpy())
    refused(run(*arguments), "both.npy is there already; --overwrite")
    (outdir / "low.npy").write_bytes(b"")
    assert run(*arguments, "--overwrite")[0] == 0
    np.testing.assert_array_equal(np.load(outdir / "low.npy"), expected["low"].detach().numpy())


def test_examples_go_before_expressions_and_these_before_files(run, folder, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, 4)))
    outdir = tmp_path / "results"
    files = ("--inputs", f"x={tmp_path}/x.npy")
    examples = ("--input_examples", 'inputs=[{"y": [1, 2, 3, 4]}, {"y": [5, 6, 7, 8]}]')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("run", "--dir", folder, *SERVE, *files, "--input_exprs", ONES, *examples,
            "--outdir", outdir)  # fmt: skip
    assert sorted(str(warning.message) for warning in caught) == [
        "input 'x': --input_exprs goes before --inputs",
        "input 'y': --input_examples goes before --input_exprs",
    ]
    y = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    expected = branches()(torch.ones(2, 4), y)["both"].detach().numpy()
    np.testing.assert_array_equal(np.load(outdir / "both.npy"), expected)


def test_debugging_prints_every_node(run, folder):
    status, out, _ = run("run", "--dir", folder, *SERVE, "--input_exprs", ONES, "--tf_debug")
    assert status == 0
    names = [group.name for group in load(folder)["serving_default"].groups()]
    for name in names[names.index("left/0/linear") :]:
        assert name == "split" or re.search(rf"^{name}: float32 \[2, \d\] min \S+ max", out, re.M)


def npy(array, **changes):
    file = io.BytesIO()
    np.save(file, array)
    content = file.getvalue()
    for old, new in changes.values():
        assert old in content
        content = content.replace(old, new)
    return content


class Canary:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("trust", [(), ("--trust",)])
def test_no_input_is_unpickled(run, folder, tmp_path, trust):
    canary = tmp_path / "canary"
    objects = np.array([Canary(canary), None], dtype=object)
    np.save(tmp_path / "objects.npy", objects)
    np.savez(tmp_path / "objects.npz", x=objects)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Canary(canary)))
    (tmp_path / "inside.npz").write_bytes(packed({"x.npy": pickle.dumps(Canary(canary))}))
    for name in ("objects.npy", "objects.npz", "pickle.npy", "inside.npz"):
        inputs = ("--inputs", f"x={tmp_path}/{name}")
        refused(run("run", "--dir", folder, *SERVE, *inputs, *trust), "pickled inputs are refused")
    assert not canary.exists()


def test_files_that_lie_are_refused(run, folder, tmp_path):
    good = np.arange(8.0).reshape(2, 4)
    large = (b"(2, 4)", b"(2**9)"), (b"(2, 4)", b"(9,99)"), (b"'<f8'", b"'<m8'")
    cases = {f"{i}.npy": npy(good, change=change) for i, change in enumerate(large)}
    cases["cut.npy"] = npy(good)[:-1]
    cases["several.npz"] = packed({"a.npy": npy(good), "b.npy": npy(good)})
    cases["cut.npz"] = packed({"a.npy": npy(good)})[:-9]
    cases["long.npz"] = packed({"a.npy": npy(good) + bytes(9)})
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        result = run("run", "--dir", folder, *SERVE, "--inputs", f"x={tmp_path}/{name}")
        refused(result, re.escape(str(tmp_path / name)))
    missing = run("run", "--dir", folder, *SERVE, "--inputs", f"x={tmp_path}/several.npz[c]")
    refused(missing, "no member 'c'.*'a', 'b'")


@pytest.mark.parametrize(
    ("option", "text", "problem"),
    [
        ("--inputs", "x", "'x' is not key=value"),
        ("--inputs", "x=/nowhere/x.npy", "/nowhere/x.npy cannot be read"),
        ("--input_exprs", "q=np.ones(2)", "unknown input 'q'; valid are 'x', 'y'"),
        ("--input_exprs", "x=np.ones((2, 4))", "no value for input 'y'"),
        ("--input_exprs", "x=open('f')", "open"),
        ("--input_exprs", "x=1;x=2", "'x' is there twice"),
        ("--input_exprs", "x=np.ones((2, 5));y=1", r"input 'x' has shape \[2, 5\], not \[any, 4\]"),
        ("--input_examples", "i=[{'x': [1]}, {'y': [1]}]", "'x' is not in all"),
        ("--input_examples", "i=[{'x': [1, 2]}, {'x': [1]}]", "feature 'x' has 1"),
        ("--input_examples", "i=[{'x': [1, 'a']}]", "feature 'x' has values of kinds"),
        ("--input_examples", "i=[{'x': 1}]", "feature 'x' is a int"),
        ("--input_examples", "i=[f()]", "no list of examples"),
        ("--input_examples", f"i={'[' * 11}{']' * 11}", "nested more than 10"),
        ("--worker", "ipu:0", "'ipu:0'"),
    ],
)
def test_run_says_what_is_wrong(run, folder, option, text, problem):
    exprs = () if option == "--input_exprs" else ("--input_exprs", "y=np.ones((2, 4))")
    refused(run("run", "--dir", folder, *SERVE, option, text, *exprs), problem)


def test_run_needs_an_input_and_a_type_that_fits(run, folder, tmp_path):
    refused(run("run", "--dir", folder, *SERVE), "no inputs")
    np.save(tmp_path / "x.npy", np.ones((2, 4), np.complex64))
    result = run("run", "--dir", folder, *SERVE, "--inputs", f"x={tmp_path}/x.npy")
    refused(result, "input 'x' is complex64, which does not go into float32")


def test_a_traceback_is_printed_for_who_asks(run, folder):
    _, _, err = run("show", "--dir", folder, "--tag_set", "no", "--traceback")
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_other_files_are_no_saved_programs(run, tmp_path):
    (tmp_path / "saved_model.pbtxt").write_bytes(b"")
    refused(run("show", "--dir", tmp_path), "text form")
    os.remove(tmp_path / "saved_model.pbtxt")
    refused(run("show", "--dir", tmp_path), "no saved program found")
