"""Check executables of converted programs: results, where they are found, what is refused."""

import json
import os
import shutil
import threading

import pytest
import torch
from torch import nn
from torch.export import Dim

from ipu_dynamo.saved_model import load, save
from ipu_dynamo.saved_model.command.main import main
from ipu_dynamo.saved_model.conversion.convert import convert
from ipu_dynamo.saved_model.conversion.executable.direct_call import DirectCall
from ipu_dynamo.saved_model.conversion.settings.ipu_config import IpuSettings
from ipu_dynamo.saved_model.exported.flat_program import FlatProgram
from tests.saved_model.converting import (
    assert_like,
    converted,
    embedded,
    inputs,
    save_branches,
)
from tests.saved_model.prepared_processes import errors_of, run, run_loaded

REFUSAL = "a signature cannot be called or closed within its own call"


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "saved"
    return folder, save_branches(folder)


@pytest.fixture(scope="module")
def program(source, tmp_path_factory):
    """A converted program with three micro-batches of two rows in a step, and the model."""
    out = tmp_path_factory.mktemp("out") / "converted"
    convert(source[0], out, **embedded(batch_size=2, batch_per_step=3))
    return out, source[1]


# --- Rows, steps, padding ------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13])
def test_any_number_of_rows_gives_the_modules_results(program, rows):
    out, model = program
    with load(out)["serving_default"] as signature:
        assert signature.inputs["x"].shape == (None, 8)
        assert signature.inputs["ids"].dtype == "int64"
        assert_like(signature, model, rows)


def test_no_row_is_refused_and_leaves_the_object_usable(program):
    out, model = program
    signature = load(out)["serving_default"]
    with pytest.raises(ValueError, match=r"0|row"):
        signature(**{name: value[:0] for name, value in inputs(2).items()})
    with pytest.raises(ValueError, match=r"input 'ids'.*int32"):
        signature(**{**inputs(2), "ids": torch.tensor([1, 2**40])})
    assert_like(signature, model, 3)


def test_one_row_is_enough_where_the_program_was_exported_for_two_or_more(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    shapes = {"input": {0: Dim("rows", min=2, max=9)}}
    save(tmp_path / "p", {"serving_default": (model, (torch.randn(3, 4),), shapes)})
    signature = converted(tmp_path / "p", tmp_path / "out", **embedded())
    x = torch.randn(9, 4)
    for rows in (1, 2, 9):
        torch.testing.assert_close(signature(input=x[:rows])["output_0"], model(x[:rows]))
    with pytest.raises(ValueError, match="input 'input' has a size 10, not 1 to 9"):
        signature(input=torch.randn(10, 4))


@pytest.mark.parametrize("batch_per_step", [0, 3])
def test_a_fixed_program_is_one_micro_batch(tmp_path, batch_per_step):
    model = save_branches(tmp_path / "p", dynamic=False)
    options = embedded(batch_per_step=batch_per_step)
    signature = converted(tmp_path / "p", tmp_path / "out", **options)
    assert_like(signature, model, 4)
    value = json.loads((tmp_path / "out/cache/application.json").read_text())
    assert (value["batch_size"], value["batch_per_step"]) == (4, max(1, batch_per_step))


def test_another_batch_size_than_a_fixed_one_is_refused(tmp_path):
    save_branches(tmp_path / "p", dynamic=False)
    with pytest.raises(ValueError, match="batch_size is 3, and the inputs have 4 rows"):
        convert(tmp_path / "p", tmp_path / "out", **embedded(batch_size=3))
    assert not (tmp_path / "out").exists()


class Unshared(nn.Module):
    """Inputs without rows of the same number, and results without dimensions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, scale, bias):
        y = self.linear(x) * scale + bias
        return {"y": y, "sum": y.sum(), "constant": torch.ones(2) * 3}


@pytest.mark.parametrize("batch_per_step", [1, 3])
def test_inputs_that_share_no_rows_stay_as_they_are(tmp_path, batch_per_step):
    torch.manual_seed(0)
    model = Unshared().eval()
    example = (torch.randn(5, 4), torch.tensor(2.0), torch.randn(3))
    save(tmp_path / "p", {"serving_default": (model, example)})
    options = embedded(batch_size=7, batch_per_step=batch_per_step)
    signature = converted(tmp_path / "p", tmp_path / "out", **options)
    results, expected = signature(**dict(zip(("x", "scale", "bias"), example, strict=True))), None
    expected = model(*example)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value)


class Mixing(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x):
        y = self.linear(x)
        match self.kind:
            case "sum":
                return {"y": y, "total": y.sum(0)}
            case "mean":
                return {"y": y - y.mean(0)}
            case "more":
                return {"y": torch.cat([y, y])}


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("sum", "output 'total'"),
        ("more", "output 'y'"),
        ("mean", "a row of a result may depend on other rows"),
    ],
)
def test_results_that_are_not_of_single_rows_are_refused(tmp_path, kind, problem):
    shapes = {"x": {0: Dim("rows", min=1, max=64)}}
    save(tmp_path / "p", {"serving_default": (Mixing(kind), (torch.randn(4, 4),), shapes)})
    with pytest.raises(ValueError, match=problem):
        convert(tmp_path / "p", tmp_path / "out", **embedded())
    assert not (tmp_path / "out").exists()


def test_a_second_size_that_calls_choose_is_refused(tmp_path):
    shapes = {"x": {0: Dim("rows", min=1, max=64), 1: Dim("length", min=1, max=64)}}
    save(
        tmp_path / "p",
        {"serving_default": (nn.ReLU(), (torch.randn(4, 4),), {"input": shapes["x"]})},
    )
    with pytest.raises(ValueError, match="input 'input' has dimension 1 of a size that calls"):
        convert(tmp_path / "p", tmp_path / "out", **embedded())


# --- Host nodes around, options ------------------------------------------------------------------


def test_host_nodes_stay_around_the_call(tmp_path, source, capsys):
    options = embedded(excluded_nodes=["^table/", "^res/", "^view", "transpose"], batch_size=2)
    signature = converted(source[0], tmp_path / "out", **options)
    assert_like(signature, source[1], 5)
    capsys.readouterr()
    arguments = ["--dir", str(tmp_path / "out"), "--tag_set", "serve"]
    assert not main(["show", *arguments, "--signature_def", "serving_default", "--nodes", "--json"])
    shown = json.loads(capsys.readouterr().out)
    nodes = {node["name"]: node for node in shown if node["kind"] == "op"}
    assert nodes["left/0/0/linear"]["device"] == "ipu"
    assert nodes["left/0/0/linear"]["ipu"] == 0
    assert nodes["left/0/0/linear"]["op"] == "aten.linear.default"
    assert nodes["res/linear"]["device"] == "host"
    assert not any("executable" in node["op"] for node in shown)


def test_a_host_node_between_is_refused(tmp_path, source):
    with pytest.raises(ValueError, match="host node 'left/1/0/linear' lies between IPU nodes"):
        convert(source[0], tmp_path / "out", **embedded(excluded_nodes=["^left/1/0"]))
    assert not (tmp_path / "out").exists()


def test_half_precision_and_sharding_are_compiled_in(tmp_path, source):
    options = embedded(
        precision_mode="FP16", num_ipus=2, manual_sharding=[["left"], ["middle", "res"]]
    )
    signature = converted(source[0], tmp_path / "out", **options)
    assert_like(signature, source[1], 3, within=2e-2)
    value = json.loads((tmp_path / "out/cache/application.json").read_text())
    assert value["num_ipus"] == 2
    assert value["pipeline"] is None
    shown = {node["name"]: node for node in signature.compiled_nodes()}
    assert shown["middle/0/0/linear"]["ipu"] == 1
    assert shown["left/0/0/linear"]["ipu"] == 0


# --- Files ---------------------------------------------------------------------------------------


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_same_conversion_gives_the_same_bytes_also_from_its_parameters(tmp_path, source):
    options = embedded(batch_size=2, batch_per_step=2, excluded_nodes=["^res"])
    convert(source[0], tmp_path / "a", **options)
    convert(source[0], tmp_path / "b", **options)
    convert(source[0], tmp_path / "c", config_file=tmp_path / "a/conversion_params.json")
    first = files_of(tmp_path / "a")
    assert {"cache/application.ipu_exec", "cache/application.json"} <= first.keys()
    assert first == files_of(tmp_path / "b") == files_of(tmp_path / "c")
    assert not any(name.startswith(".") for name in os.listdir(tmp_path))


def test_another_executable_in_the_cache_stays(tmp_path, source):
    cache = tmp_path / "cache"
    for name, batch_size in (("a", 2), ("b", 3), ("c", 2)):
        convert(source[0], tmp_path / name, **embedded(str(cache), batch_size=batch_size))
    names = sorted(os.listdir(cache))
    assert len(names) == 4
    assert names[2:] == ["application.ipu_exec", "application.json"]
    for name in "abc":
        assert_like(load(tmp_path / name)["serving_default"], source[1], 4)
    index = json.loads((tmp_path / "b/saved_model.json").read_text())
    entry = index["meta_graphs"][0]["signature_defs"]["serving_default"]
    assert entry["placement"]["executable"] == str(cache / names[0])


def test_a_cache_that_no_index_can_name_is_refused(tmp_path, source):
    with pytest.raises(ValueError, match=r"no index can name the path 'a\\nb/application"):
        convert(source[0], tmp_path / "out", **embedded("a\nb"))
    assert not any(tmp_path.iterdir())


def test_a_cache_in_the_output_by_another_name_goes_with_it(tmp_path, source):
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    convert(source[0], tmp_path / "out", **embedded(str(tmp_path / "link/out/cache")))
    (tmp_path / "out").rename(tmp_path / "moved")
    assert_like(load(tmp_path / "moved")["serving_default"], source[1], 4)


def test_description_says_what_is_taken_and_given(program):
    value = json.loads((program[0] / "cache/application.json").read_text())
    assert value["format"] == "ipu_dynamo.executable"
    assert value["format_version"] == 1
    assert value["inputs"]["x"] == {"position": 0, "dtype": "float32", "shape": [2, 8]}
    assert any(spec["dtype"] == "int32" for spec in value["inputs"].values())
    assert value["batch_size"] == 2
    assert value["batch_per_step"] == 3
    assert value["runtime_api_timeout_us"] == 5000


def test_it_runs_in_another_process_from_another_place(tmp_path, source):
    copy, moved = tmp_path / "copy", tmp_path / "moved/there"
    shutil.copytree(source[0], copy)
    convert(copy, tmp_path / "out", **embedded(batch_size=2))
    shutil.rmtree(copy)
    moved.parent.mkdir()
    os.rename(tmp_path / "out", moved)
    given = inputs(5)
    torch.save(given, tmp_path / "in.pt")
    files = moved, tmp_path / "in.pt", tmp_path / "result.pt"
    output = tmp_path / "output"
    assert run(run_loaded, *files, output=output) == 0, errors_of(output)
    results = torch.load(tmp_path / "result.pt", weights_only=True)
    expected = source[1](**given)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value)


# --- What is refused before anything runs --------------------------------------------------------


@pytest.fixture
def copied(program, tmp_path):
    shutil.copytree(program[0], tmp_path / "copied")
    return tmp_path / "copied"


def refused(out):
    signature = load(out)["serving_default"]
    with pytest.raises(RuntimeError) as caught:
        signature.warm_up()
    assert "convert" in str(caught.value)
    return str(caught.value)


def test_a_missing_executable_is_refused(copied):
    (copied / "cache/application.ipu_exec").unlink()
    assert "is missing" in refused(copied)


def test_another_checksum_is_refused_with_both_sums(copied):
    path = copied / "cache/application.ipu_exec"
    value = json.loads((copied / "cache/application.json").read_text())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert value["sha256"] in refused(copied)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format_version": 2}, "format version 2, and this version reads up to 1"),
        ({"format": "other"}, "its format is not"),
        ({"format_version": "1"}, "format version '1'"),
    ],
)
def test_another_format_is_refused_with_both_versions(copied, change, problem):
    path = copied / "cache/application.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert problem in refused(copied)


def test_an_operator_that_is_not_here_is_refused_by_name(program, tmp_path, monkeypatch):
    from ipu_dynamo.saved_model.conversion.executable import open_executable

    def entry_names(*args):
        raise open_executable.SavedProgramError(
            open_executable.Reason.OPERATOR, "aten.tanh.default is not registered here"
        )

    monkeypatch.setattr(open_executable, "entry_names", entry_names)
    assert "aten.tanh.default" in refused(program[0])


def test_a_program_that_calls_an_executable_is_not_converted_again(program, tmp_path):
    with pytest.raises(ValueError, match=r"calls the executable 'cache/"):
        convert(program[0], tmp_path / "again")
    assert not (tmp_path / "again").exists()


# --- The object ----------------------------------------------------------------------------------


def test_four_threads_on_one_object_get_their_own_results(program):
    out, model = program
    signature, failures = load(out)["serving_default"], []

    def call(number):
        try:
            for turn in range(5):
                assert_like(signature, model, 1 + (number * 3 + turn) % 7)
        except BaseException as error:  # told below
            failures.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("action", ["call", "close"])
def test_a_call_within_a_call_is_refused_and_the_outer_one_goes_on(program, action):
    signature, refusals = load(program[0])["serving_default"], []

    def watch(*_):
        with pytest.raises(RuntimeError) as error:
            signature(**inputs(2)) if action == "call" else signature.close()
        refusals.append(str(error.value))

    with signature:
        outputs = signature.watched(inputs(2), watch)
        assert set(refusals) == {REFUSAL}
        for name, value in signature(**inputs(2)).items():
            assert torch.equal(value, outputs[name])


def test_nothing_is_read_after_warm_up_and_closing_frees_it(program, tmp_path):
    shutil.copytree(program[0], tmp_path / "copied")
    with load(tmp_path / "copied")["serving_default"] as signature:
        signature.warm_up()
        shutil.rmtree(tmp_path / "copied")
        assert_like(signature, program[1], 3)
    signature.close()
    with pytest.raises(RuntimeError, match="closed"):
        signature(**inputs(2))


def test_arguments_are_not_changed_and_results_are_new(program):
    signature, given = load(program[0])["serving_default"], inputs(6)
    before = {name: value.clone() for name, value in given.items()}
    first = signature(**given)
    second = signature(**given)
    first["y"].zero_()
    assert all(torch.equal(given[name], before[name]) for name in given)
    assert second["y"].abs().sum() > 0


def test_a_call_alone_runs_without_the_graph_around_it(program, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(FlatProgram, "run", lambda *args: ran.append(args))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    shapes = {"input": {0: Dim("rows", min=1, max=9)}}
    save(tmp_path / "p", {"serving_default": (model, (torch.randn(3, 4),), shapes)})
    with converted(tmp_path / "p", tmp_path / "out", **embedded(batch_size=5)) as signature:
        for rows in (5, 3, 7):  # a full step, a short one, two
            x = torch.randn(rows, 4)
            torch.testing.assert_close(signature(input=x)["output_0"], model(x))
    assert not ran
    with load(program[0])["serving_default"] as signature:  # casts on the host stay around it
        with pytest.raises(TypeError):
            signature(**inputs(2))
        assert ran


def test_results_of_another_form_than_the_program_says_are_refused(tmp_path):
    call = DirectCall([0], [0], ["float32[?,4]"])
    x = torch.randn(3, 4)
    assert call.run(lambda values: [values[0] + 1], [x])[0].shape == (3, 4)
    assert call.run(lambda values: values, [x])[0] is not x  # results share nothing with inputs
    with pytest.raises(RuntimeError, match="the executable gives"):
        call.run(lambda values: [values[0].double()], [torch.randn(2, 4)])


def test_settings_of_an_executable_hold(program):
    signature = load(program[0])["serving_default"]
    with pytest.warns(UserWarning, match="is ignored"):
        signature.configure(IpuSettings(num_ipus=4))
    assert signature.settings == IpuSettings()
