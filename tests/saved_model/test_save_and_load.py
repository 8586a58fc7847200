"""Check that what is loaded computes what was saved, under the names that it says."""

import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from ipu_dynamo.saved_model import available_tag_sets, load, save
from tests.saved_model.programs import Pair, archive, branches, exported

BATCH = Dim("batch", min=1, max=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved program of one signature, and its module."""
    path = tmp_path_factory.mktemp("saved") / "program"
    example = (torch.randn(6, 4), torch.randn(6, 4))
    save(path, {"serving_default": (branches(), example, ({0: BATCH}, {0: BATCH}))})
    return path


def equal(results, expected):
    return list(results) == list(expected) and all(
        torch.equal(results[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_loaded_program_computes_what_the_module_does(folder, rows):
    x, y = torch.randn(rows, 4), torch.randn(rows, 4)
    assert equal(load(folder)["serving_default"](x=x, y=y), branches()(x, y))


def test_archives_alone_have_the_names_of_their_results(tmp_path):
    (tmp_path / "alone.pt2").write_bytes(archive())
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for path in (tmp_path, tmp_path / "alone.pt2"):
        assert available_tag_sets(path) == [["serve"]]
        assert equal(load(path)["serving_default"](x=x, y=y), branches()(x, y))


def test_nodes_have_the_names_of_their_modules(folder):
    names = [group.name for group in load(folder)["serving_default"].groups()]
    expected = """left/0/weight left/0/bias right/weight right/bias norm/weight norm/bias shift
        norm/running_mean norm/running_var norm/num_batches_tracked scale x y left/0/linear
        left/1/relu norm/batch_norm split right/linear mul add cat add_1 left/0/linear_1
        left/1/relu_1"""
    assert sorted(names) == sorted(expected.split())


def test_names_are_the_same_before_and_after_saving(tmp_path, folder):
    (tmp_path / "alone.pt2").write_bytes(archive())
    alone, saved = load(tmp_path)["serving_default"], load(folder)["serving_default"]
    assert [g.name for g in alone.groups()] == [g.name for g in saved.groups()]


@dataclass
class Scores:
    total: torch.Tensor
    parts: tuple[torch.Tensor, torch.Tensor]


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, states):
        a, b = x + states[0], x * states[1]["k"]
        return {
            "one": a,
            "tuple": (a, [b]),
            "mapping": {"a": a, "none": None, "b": {"c": b}},
            "named tuple": Pair(a, b),
            "dataclass": Scores(a, (a, b)),
        }[self.kind]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("one", ["output_0"]),
        ("tuple", ["output_0", "output_1_0"]),
        ("mapping", ["a", "b_c"]),
        ("named tuple", ["first", "second"]),
        ("dataclass", ["total", "parts_0", "parts_1"]),
    ],
)
def test_names_say_where_tensors_are(tmp_path, kind, names):
    x, states = torch.randn(2), [torch.randn(2), {"k": torch.randn(2)}]
    save(tmp_path / "p", {"s": (Returns(kind), (x, states), None)})
    signature = load(tmp_path / "p")["s"]
    assert list(signature.inputs) == ["x", "states_0", "states_1_k"]
    assert list(signature.outputs) == names
    results = signature(x=x, states_0=states[0], states_1_k=states[1]["k"])
    assert torch.equal(results[names[0]], x + states[0])
    assert kind == "one" or torch.equal(results[names[-1]], x * states[1]["k"])


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (lambda x: {"a": x, "b": 3}, "'b' is a int"),
        (lambda x: {1: x}, "the key 1"),
        (lambda x: {"a": (x, x), "a_0": x}, "'a_0'"),
    ],
)
def test_results_without_names_are_refused(tmp_path, result, problem):
    class Module(nn.Module):
        def forward(self, x):
            return result(x)

    with pytest.raises(ValueError, match=re.escape(problem)):
        save(tmp_path / "p", {"s": (Module(), (torch.randn(2),))})
    assert not list(tmp_path.iterdir())


def test_programs_and_tag_sets_lie_side_by_side(tmp_path):
    example = (torch.randn(6, 4), torch.randn(6, 4))
    values = {"a/b": exported(), "c": (branches(), example[:1], {"y": example[1]}, None)}
    save(tmp_path / "p", values, tags=("gpu", "serve"))
    assert available_tag_sets(tmp_path / "p") == [["gpu", "serve"]]
    loaded = load(tmp_path / "p", ("serve", "gpu"))
    assert loaded["c"].inputs["x"].shape == (6, 4)
    assert loaded["a/b"].inputs["x"].shape == (None, 4)
    with pytest.raises(RuntimeError, match=r"available are gpu,serve"):
        load(tmp_path / "p", ("serve",))


def test_the_module_is_not_changed(folder, tmp_path):
    model = branches()
    before = dict(model.__dict__)
    save(tmp_path / "p", {"s": (model, (torch.randn(2, 4), torch.randn(2, 4)))})
    assert model.__dict__ == before
    with pytest.raises(FileExistsError, match="not empty"):
        save(tmp_path / "p", {"s": exported()})
    save(tmp_path / "p", {"t": exported()}, overwrite=True)
    assert list(load(tmp_path / "p")) == ["t"]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    save(tmp_path / "p", {"s": exported()})
    rename = os.rename

    def unfinished_stays(old, new):
        if ".unfinished-" in Path(old).name:
            raise OSError("no room")
        rename(old, new)

    monkeypatch.setattr(os, "rename", unfinished_stays)
    with pytest.raises(OSError, match="no room"):
        save(tmp_path / "p", {"t": exported()}, overwrite=True)
    assert list(load(tmp_path / "p")) == ["s"]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_warming_up_changes_no_answer(tmp_path):
    save(tmp_path / "p", {"s": exported()})
    warm, cold = (load(tmp_path / "p")["s"] for _ in range(2))
    warm.warm_up()
    inputs = {
        name: torch.randn([size or 3 for size in spec.shape]) for name, spec in warm.inputs.items()
    }
    answers = warm(**inputs), cold(**inputs)
    assert answers[0].keys() == answers[1].keys()
    assert all(torch.equal(answers[0][name], value) for name, value in answers[1].items())
    warm.close()
    with pytest.raises(RuntimeError):
        warm.warm_up()


@pytest.mark.parametrize(
    ("tensors", "error", "problem"),
    [
        ({"x": (3, 4)}, ValueError, "no value for input 'y'"),
        ({"x": (3, 4), "y": (2, 4)}, ValueError, "input 'y' has a size 2 where input 'x' has 3"),
        ({"x": (65, 4), "y": (65, 4)}, ValueError, "input 'x' has a size 65, not 1 to 64"),
        ({"x": (3, 5), "y": (3, 4)}, ValueError, "input 'x' has shape [3, 5], not [any, 4]"),
        ({"q": (3, 4)}, ValueError, "unknown input 'q'; valid are 'x', 'y'"),
        ({"x": (3, 4), "y": None}, TypeError, "input 'y' is a NoneType"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_object_usable(folder, tensors, error, problem):
    values = {k: None if shape is None else torch.randn(shape) for k, shape in tensors.items()}
    with load(folder)["serving_default"] as signature:
        with pytest.raises(error, match=re.escape(problem)):
            signature(**values)
        x = torch.ones(2, 4)
        assert equal(signature(x=x, y=x), branches()(x, x))
    with pytest.raises(RuntimeError, match="closed"):
        signature(x=x, y=x)
    signature.close()


@pytest.mark.parametrize(
    ("dtype", "fits"), [(torch.int64, True), (torch.float64, True), (torch.complex64, False)]
)
def test_types_are_converted_where_values_stay(folder, dtype, fits):
    signature = load(folder)["serving_default"]
    x = torch.arange(8).reshape(2, 4).to(dtype)
    if fits:
        assert equal(signature(x=x, y=x), branches()(x.float(), x.float()))
    else:
        with pytest.raises(TypeError, match=r"'x' is complex64.*float32"):
            signature(x=x, y=x)


class Aliases(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        x.mul_(2)
        return x, x[0], self.count


def test_results_are_new_and_arguments_stay(tmp_path):
    x = torch.ones(2, 3)
    save(tmp_path / "p", {"s": (Aliases(), (x.clone(),))})
    first, second = load(tmp_path / "p")["s"], load(tmp_path / "p")["s"]
    assert first(x=x)["output_2"] == 1
    results = first(x=x)
    assert torch.equal(x, torch.ones(2, 3))
    assert torch.equal(results["output_0"], torch.full((2, 3), 2.0))
    assert results["output_2"] == 2  # the state is the object's
    results["output_2"].zero_()
    assert first(x=x)["output_2"] == 3
    assert second(x=x)["output_2"] == 1


class Difference(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.ones(3, 2))

    def forward(self, left, right):
        return left - 2 * right + self.centre


@pytest.mark.parametrize("kind", ["one tensor twice", "a buffer"])
def test_each_example_argument_is_an_input_of_its_own(tmp_path, kind):
    model, x, left, right = Difference(), *torch.randn(3, 3, 2)
    save(tmp_path / "p", {"s": (model, (x, x if kind == "one tensor twice" else model.centre))})
    result = load(tmp_path / "p")["s"](left=left, right=right)["output_0"]
    torch.testing.assert_close(result, model(left, right))


def test_threads_share_an_object(folder):
    signature = load(folder)["serving_default"]
    inputs = [torch.randn(rows, 4) for rows in range(1, 9)]
    results = {}

    def call(index):
        results[index] = signature(x=inputs[index], y=inputs[index])

    threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(results[i], branches()(x, x)) for i, x in enumerate(inputs))


def _index(folder, change):
    index = json.loads((folder / "saved_model.json").read_text())
    change(index, index["meta_graphs"][0]["signature_defs"]["serving_default"])
    (folder / "saved_model.json").write_text(json.dumps(index))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda i, s: i.update(format_version=2), "format_version 2 is newer than 1"),
        (lambda i, s: i["meta_graphs"].append(i["meta_graphs"][0]), "two meta graphs"),
        (lambda i, s: s.update(program="../x.pt2"), "no path inside"),
        (lambda i, s: s.update(program="/etc/x.pt2"), "no path inside"),
        (lambda i, s: s.update(sha256="0" * 64), "damaged"),
        (lambda i, s: s.pop("sha256"), "lacks"),
        (lambda i, s: s["inputs"]["x"].update(position=1), "position 1, which does not fit"),
        (lambda i, s: s["inputs"]["x"].update(dtype="int64"), "'x' is int64"),
        (lambda i, s: s["outputs"]["low"].update(shape=[None, 5]), "'low'"),
        (lambda i, s: s["inputs"].pop("y"), "position 1 has no name"),
        (lambda i, s: s.update(extra=1), "'extra' is not known"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, change, problem):
    save(tmp_path / "p", {"serving_default": exported()})
    _index(tmp_path / "p", change)
    with pytest.raises(ValueError, match=re.escape(problem)):
        load(tmp_path / "p")


def test_a_changed_program_is_damaged(tmp_path):
    save(tmp_path / "p", {"serving_default": exported()})
    (path,) = (tmp_path / "p").rglob("*.pt2")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        load(tmp_path / "p")
    assert hashlib.sha256(content).hexdigest() not in (tmp_path / "p/saved_model.json").read_text()


def test_equal_programs_are_equal_files(tmp_path):
    for name in "ab":
        save(tmp_path / name, {"s": exported()})
    files = {name: sorted((tmp_path / name).rglob("*.*")) for name in "ab"}
    for one, other in zip(files["a"], files["b"], strict=True):
        assert one.read_bytes() == other.read_bytes()
