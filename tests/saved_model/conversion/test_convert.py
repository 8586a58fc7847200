"""Check what `convert` writes, and that converted programs compute what their modules do."""

import json
import random
import re
import shutil
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from ipu_dynamo.saved_model import convert, load, save
from ipu_dynamo.saved_model.directory import SavedPrograms
from ipu_dynamo.saved_model.files.new_folder import new_folder
from tests.saved_model.conversion.drawn_options import Drawn
from tests.saved_model.converting import ROWS, three_branches
from tests.saved_model.converting import inputs as rows_of
from tests.saved_model.programs import branches, exported
from tests.saved_model.test_command import SERVE, refused, run  # noqa: F401  a fixture
from tests.saved_model.test_real_models import bert, residual, vit

FIXTURES = Path(__file__).parent.parent / "fixtures"
RESULTS = sorted((p for p in FIXTURES.glob("*/*-*.npz") if "examples" not in str(p)), key=str)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


def inputs(rows=3):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, 4, generator=generator) for name in "xy"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("convert") / "program"
    save(path, {"serving_default": exported(), "other": exported()}, tags=("serve", "cpu"))
    (path / "assets").mkdir()
    (path / "assets" / "words.txt").write_text("a b")
    return path


TAGS = {"tags": ("cpu", "serve")}


def nodes(path, key="serving_default", tags=("serve", "cpu")):
    """Names of operators with the rest of what `show --nodes` says."""
    from ipu_dynamo.saved_model.command.show_command import nodes_json

    with SavedPrograms(path).signature(tags, key) as signature:
        return {node["name"]: node for node in nodes_json(signature)}


def close(results, expected, off=1e-5):
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert results[name].dtype == value.dtype
        largest = float(value.double().abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(results[name], value, rtol=0, atol=off * largest)


def test_one_signature_is_written_with_its_placement(folder, tmp_path):
    out = tmp_path / "new" / "out"
    convert(folder, out, **TAGS, excluded_nodes=["relu"], matmul_partial_type="half", num_ipus=4)
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert names == [
        "assets/words.txt", "conversion_params.json", "ipu_config.json",
        "programs/cpu+serve/serving_default.pt2", "saved_model.json",
    ]  # fmt: skip
    settings = json.loads((out / "ipu_config.json").read_text())
    assert settings == {
        "num_ipus": 4, "matmul_amp": 0.6, "conv_amp": 0.6, "matmul_partial_type": "half",
        "conv_partial_type": "float",
    }  # fmt: skip
    (graph,) = json.loads((out / "saved_model.json").read_text())["meta_graphs"]
    assert list(graph["signature_defs"]) == ["serving_default"]
    entry = graph["signature_defs"]["serving_default"]
    assert json.loads((out / "conversion_params.json").read_text())["sha256"] == entry["sha256"]
    parts = entry["placement"]["partitions"]
    assert [part["device"] for part in parts] == ["ipu", "host", "ipu", "host"]
    assert parts[1]["nodes"] == ["left/1/relu"]
    assert set(entry["placement"]["ipu"].values()) == {0}
    shown = nodes(out)
    assert {shown[name]["device"] for name in ("left/1/relu", "left/1/relu_1", "x")} == {"host"}
    assert (shown["mul"]["device"], shown["mul"]["ipu"], shown["mul"]["stage"]) == ("ipu", 0, None)
    with load(out, ["serve", "cpu"])["serving_default"] as signature, torch.no_grad():
        for rows in (3, 1, 3):
            close(signature(**inputs(rows)), branches()(**inputs(rows)))


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"no_ipu_placement": True},
        {"excluded_nodes": ["norm"], "merge_subgraphs": False},
        {"num_ipus": 2, "manual_sharding": [["."], ["right", "split"]]},
        {"num_ipus": 2, "manual_sharding": [["."], ["^mul$", "^split$", "^add_1$", "relu"]]},
        {"matmul_partial_type": "half", "conv_partial_type": "half", "matmul_amp": 0.1},
        {"batch_size": 2, "batch_per_step": 3},
        {"int64_to_int32_conversion": True},
        {"precision_mode": "FP32"},
        {"precision_mode": "FP16", "precision_conversion_excluded_nodes": ["."]},
    ],
)
def test_options_keep_what_a_program_computes(folder, tmp_path, options):
    convert(folder, tmp_path / "out", **TAGS, **options)
    with load(tmp_path / "out", ["serve", "cpu"])["serving_default"] as signature, torch.no_grad():
        close(signature(**inputs()), branches()(**inputs()))


def test_the_same_conversion_writes_the_same_bytes(folder, tmp_path):
    options = {"precision_mode": "FP16", "excluded_nodes": ["relu"], "num_ipus": 2}
    options |= {"manual_sharding": [["left"], ["right"]], "conv_amp": 0.25}
    convert(folder, tmp_path / "a", **TAGS, **options)
    convert(folder, tmp_path / "b", **TAGS, **options)
    params = tmp_path / "a" / "conversion_params.json"
    convert(folder, tmp_path / "c", **TAGS, config_file=params)
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file():
            rest = path.relative_to(tmp_path / "a")
            assert path.read_bytes() == (tmp_path / "b" / rest).read_bytes()
            assert path.read_bytes() == (tmp_path / "c" / rest).read_bytes()


def test_errors_leave_nothing_behind(folder, tmp_path, run):  # noqa: F811
    out = tmp_path / "deep" / "out"
    common = ("convert", "--dir", folder, "--output_dir", out, "--tag_set", "serve,cpu")
    for arguments, problem in [
        (("ipu", "--num_ipus", "0"), "num_ipus is 0"),
        (("--signature_def", "none", "ipu"), "no signature 'none'"),
        (("ipu", "--excluded_nodes", "mul", "--merge_subgraphs"), "'right/linear'"),
        (("ipu", "--config_file", tmp_path / "no"), "cannot be read"),
        (("ipu", "--gelu_replacement", "{}"), "gelu_replacement"),
    ]:
        refused(run(*common, *arguments), problem)
        assert not out.parent.exists()
    out.mkdir(parents=True)
    (out / "mine").write_text("")
    refused(run(*common, "ipu"), "not empty")
    assert [path.name for path in out.iterdir()] == ["mine"]
    with pytest.raises(AssertionError, match="not empty"):
        convert(folder, out, **TAGS)


def test_a_folder_that_somebody_fills_meanwhile_is_not_replaced(tmp_path):
    def fill():
        with new_folder(tmp_path / "out", overwrite=False):
            (tmp_path / "out").mkdir()
            (tmp_path / "out/mine").write_text("")

    with pytest.raises(OSError, match="out"):
        fill()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "out"]


def test_the_command_converts_and_runs(folder, tmp_path, run):  # noqa: F811
    out = tmp_path / "out"
    status, _, _ = run(
        *("convert", "--dir", folder, "--output_dir", out, "--tag_set", "serve,cpu", "ipu"),
        *("--num_ipus", 2, "--excluded_nodes", "relu", "cat", "--precision_mode", "FP16"),
        *("--manual_sharding", "[['left'], ['right']]"),
    )
    assert status == 0
    signature = ("--dir", out, "--tag_set", "cpu,serve", "--signature_def", "serving_default")
    _, text, _ = run("show", *signature, "--nodes")
    assert re.search(
        r"^right/linear  \S+  aten.linear.default  float16 \[\?, 8\]  ipu 1$", text, re.M
    )
    np.save(tmp_path / "x.npy", inputs()["x"].numpy())
    np.save(tmp_path / "y.npy", inputs()["y"].numpy())
    feeds = ("--inputs", f"x={tmp_path / 'x.npy'};y={tmp_path / 'y.npy'}")
    assert run("run", *signature, *feeds, "--outdir", tmp_path / "results")[0] == 0
    with torch.no_grad():
        expected = branches()(**inputs())
    stored = {n: torch.from_numpy(np.load(tmp_path / "results" / f"{n}.npy")) for n in expected}
    close(stored, expected, 2e-2)
    refused(run("run", *signature, *feeds, "--init_ipu"), "2 IPUs, and num_ipus is 1")
    assert run("run", *signature, *feeds, "--init_ipu", "--num_ipus", 2)[0] == 0
    refused(run("run", *signature, *feeds, "--matmul_amp", 2), "matmul_amp is 2.0")


def test_a_head_of_the_host_is_removed(folder, tmp_path):
    out = tmp_path / "out"
    convert(
        folder, out, **TAGS, excluded_nodes=["^left/0/linear$", "^left/1/relu$", "norm"],
        remove_excluded_nodes=True, merge_subgraphs=True,
    )  # fmt: skip
    with load(out, ["serve", "cpu"])["serving_default"] as signature, torch.no_grad():
        assert list(signature.inputs) == ["y", "norm/batch_norm"]
        module = branches()
        head = module.norm(module.left(inputs()["x"]))
        results = signature(**{"y": inputs()["y"], "norm/batch_norm": head})
        close(results, module(**inputs()))
    assert not any(node["device"] == "host" for node in nodes(out).values() if node["op"])


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4), nn.Linear(12, 2)

    def forward(self, ids):
        found = self.table(ids)
        return self.last(found.reshape(ids.shape[0], 12))


def test_sizes_of_removed_inputs_are_those_of_new_ones(tmp_path):
    module, ids = Head(), torch.tensor([[0, 1, 2], [4, 4, 4]])
    save(tmp_path / "p", {"serving_default": (module, (ids,), ({0: Dim("rows")},))})
    convert(tmp_path / "p", tmp_path / "o", excluded_nodes=["emb"], remove_excluded_nodes=True)
    with load(tmp_path / "o")["serving_default"] as signature, torch.no_grad():
        assert list(signature.inputs) == ["table/embedding"]
        for rows in (ids, ids[:1], torch.cat([ids, ids])):
            value = signature(**{"table/embedding": module.table(rows)})
            close(value, {"output_0": module(rows)})


def test_later_results_of_the_host_have_a_number(folder, tmp_path):
    excluded = ["^left/.*(linear|relu)$", "norm", "split"]
    convert(folder, tmp_path / "o", **TAGS, excluded_nodes=excluded, remove_excluded_nodes=True)
    with load(tmp_path / "o", ["serve", "cpu"])["serving_default"] as signature:
        assert list(signature.inputs) == ["y", "split", "split_1"]


@pytest.mark.parametrize("option", ["merge_subgraphs", "remove_excluded_nodes"])
def test_a_host_node_behind_an_ipu_is_refused(folder, tmp_path, option):
    with pytest.raises(ValueError, match=f"{option}.*'add'.*reads IPU node 'mul'"):
        convert(folder, tmp_path / "out", **TAGS, excluded_nodes=["^add$"], **{option: True})


def test_nodes_that_all_are_excluded_leave_nothing_to_shard(folder, tmp_path):
    with pytest.raises(ValueError, match=r"manual_sharding.*no node is placed on an IPU"):
        convert(folder, tmp_path / "o", **TAGS, excluded_nodes=["."], manual_sharding=[["a"]])


def test_executables_need_a_node_on_an_ipu(folder, tmp_path):
    config = {"embedded_runtime_exec_cachedir": "exec", "runtime_api_timeout_us": 1}
    options = {"embedded_runtime_save_config": config, "int64_to_int32_conversion": True}
    with pytest.raises(ValueError, match=r"embedded_runtime.*no node is placed on an IPU"):
        convert(folder, tmp_path / "o", **TAGS, excluded_nodes=["."], **options)


def test_merging_makes_one_partition(folder, tmp_path):
    excluded = ["^right/linear$", "^mul$"]  # between nodes of IPUs, in the order of the graph
    for merged, count in ((False, 3), (True, 2)):
        out = tmp_path / str(merged)
        convert(folder, out, **TAGS, excluded_nodes=excluded, merge_subgraphs=merged)
        with load(out, ["serve", "cpu"])["serving_default"] as signature, torch.no_grad():
            assert len(signature.placement.partitions) == count
            close(signature(**inputs()), branches()(**inputs()))


def test_merging_leaves_casts_of_results_behind(tmp_path):
    class Best(nn.Module):
        def forward(self, add):
            return (add + 1).argmax(-1), add.ne(0)

    x = torch.randn(3, 4)
    save(tmp_path / "p", {"serving_default": (Best(), (x,))})
    options = {"merge_subgraphs": True, "int64_to_int32_conversion": True}
    convert(tmp_path / "p", tmp_path / "o", **options, excluded_nodes=["ne"])
    assert list(nodes(tmp_path / "o", tags=["serve"]))[:2] == ["add", "add_1"]
    with load(tmp_path / "o")["serving_default"] as signature:
        best, ne = Best()(x)
        close(signature(add=x), {"output_0": best, "output_1": ne})


def test_placements_that_do_not_fit_are_refused(folder, tmp_path):
    convert(folder, tmp_path / "out", **TAGS)
    index = tmp_path / "out" / "saved_model.json"
    text = index.read_text()
    for old, new in [
        ('"mul"', '"mull"'),
        ('"partitions"', '"parts"'),
        ('"ipu": {', '"ipu": {"q": 0,'),
    ]:
        index.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match="placement"):
            load(tmp_path / "out", ["serve", "cpu"])["serving_default"](**inputs())
    index.write_text(text)
    (tmp_path / "out" / "ipu_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"ipu_config\.json"):
        load(tmp_path / "out", ["serve", "cpu"])


class InPlace(nn.Module):
    def forward(self, x):
        y = x + 1
        y.mul_(2)
        z = torch.relu_(y - 3)
        return y, z


class WritesView(nn.Module):
    def forward(self, x):
        y = x + 1
        y[0].mul_(2)
        return y


class WritesWhatAViewSees(nn.Module):
    def forward(self, x):
        y = x + 1
        flat = y.view(-1)
        y.mul_(2)
        return flat


def test_writing_operators_become_pure(tmp_path):
    x = torch.randn(3, 4)
    save(tmp_path / "p", {"serving_default": (InPlace(), (x,))})
    convert(tmp_path / "p", tmp_path / "o")
    with load(tmp_path / "o")["serving_default"] as signature:
        y, z = InPlace()(x)
        close(signature(x=x), {"output_0": y, "output_1": z})


def test_writes_that_others_see_are_refused(tmp_path):
    x = torch.randn(3, 4)
    save(tmp_path / "view", {"serving_default": (WritesView(), (x,))})
    with pytest.raises(NotImplementedError, match=r"mul_.*others see"):
        convert(tmp_path / "view", tmp_path / "o")
    save(tmp_path / "seen", {"serving_default": (WritesWhatAViewSees(), (x,))})
    with pytest.raises(NotImplementedError, match=r"mul_.*there are views"):
        convert(tmp_path / "seen", tmp_path / "o")
    save(tmp_path / "train", {"serving_default": (nn.BatchNorm1d(4), (x,))})
    with pytest.raises(NotImplementedError, match="writes"):
        convert(tmp_path / "train", tmp_path / "o")


class Nonzero(nn.Module):
    def forward(self, x):
        return (x * 2).nonzero().float() + 1


def test_sizes_of_data_stay_on_the_host(tmp_path):
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    save(tmp_path / "p", {"serving_default": (Nonzero(), (x,))})
    with pytest.raises(ValueError, match=r"'nonzero'.*excluded_nodes"):
        convert(tmp_path / "p", tmp_path / "o")
    convert(
        tmp_path / "p", tmp_path / "o", excluded_nodes=["nonzero", "sym", "add", "to", "_assert"]
    )
    with load(tmp_path / "o")["serving_default"] as signature:
        close(signature(x=x), {"output_0": Nonzero()(x)})


class Scalar(nn.Module):
    def forward(self, x):
        total = x.sum()
        return total * 2 + x, total


class WithoutInputs(nn.Module):
    def forward(self, x):
        return torch.arange(4.0) * 2, x + 1, x


class Repeated(nn.Module):
    def forward(self, x):
        unused = x.relu()
        y = x + 1
        return y, y, y.view(-1), unused[:0]


@pytest.mark.parametrize("module", [Scalar(), WithoutInputs(), Repeated()])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"excluded_nodes": ["sum", "arange", "view"]},
        {"excluded_nodes": ["add"]},
        {"num_ipus": 2, "manual_sharding": [["."], ["mul", "view"]]},
    ],
)
def test_odd_borders_keep_what_a_program_computes(tmp_path, module, options):
    x = torch.randn(3, 4)
    save(tmp_path / "p", {"serving_default": (module, (x,))})
    convert(tmp_path / "p", tmp_path / "o", **options)
    with load(tmp_path / "o")["serving_default"] as signature:
        results = signature(x=x)
        close(results, {f"output_{i}": value for i, value in enumerate(module(x))})
        results["output_0"].add_(1)  # results are new tensors
        close(signature(x=x), {f"output_{i}": value for i, value in enumerate(module(x))})


def test_converted_programs_are_not_converted_again(folder, tmp_path):
    convert(folder, tmp_path / "o", **TAGS)
    with pytest.raises(ValueError, match="converted already"):
        convert(tmp_path / "o", tmp_path / "again", **TAGS)


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(20))
def test_random_options_keep_what_a_program_computes(folder, tmp_path, seed):
    tags = ["serve", "cpu"]
    drawn = Drawn(folder, tags, "serving_default", tmp_path, embeds=True)
    choices = [drawn.combination(random.Random(seed))]
    with torch.no_grad():
        expected = branches()(**inputs())
    check_conversions(folder, tags, "serving_default", inputs(), expected, tmp_path, choices)


def check_conversions(source, tags, key, feeds, expected, tmp_path, choices):
    for number, options in enumerate(choices):
        out = tmp_path / f"out{number}"
        convert(source, out, tags=tags, signature_def=key, **options)
        off = 2e-2 if options.get("precision_mode") == "FP16" else 1e-5
        with load(out, tags)[key] as signature, torch.no_grad():
            try:
                close(signature(**feeds), expected, off)
            except Exception as error:
                error.add_note(f"options: {options}")
                raise
        shutil.rmtree(out)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models as users have them, saved: what is in the folder, inputs, results."""

    @cache
    def saved(build, dynamic):
        torch.manual_seed(0)
        path = tmp_path_factory.mktemp("model") / "p"
        model, feeds, shapes = build()
        model.eval()
        save(path, {"s": (model, (), feeds, shapes if dynamic else None)})
        with torch.no_grad():
            expected = model(**feeds)
        expected = dict(expected) if isinstance(expected, dict) else {"output_0": expected}
        return path, feeds, expected

    return saved


def three():
    """The model of three branches."""
    example, rows = rows_of(4), {0: ROWS}
    return three_branches(), example, dict.fromkeys(example, rows)


def drawn_of(path, work, build, dynamic):
    """What is drawn for a model; BERT has a second size that calls choose."""
    embeds = not (dynamic and build is bert)
    return Drawn(path, ["serve"], "s", work, embeds=embeds, fixed=not dynamic)


@pytest.mark.few(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("build", [bert, vit, residual, three])
def test_models_compute_the_same_after_convert(tmp_path, models, build, dynamic):
    path, feeds, expected = models(build, dynamic)
    drawn = drawn_of(path, tmp_path, build, dynamic)
    choices = [{}, drawn.combination(random.Random(f"{build.__name__} {dynamic}"))]
    check_conversions(path, ["serve"], "s", feeds, expected, tmp_path, choices)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("build", [bert, vit, residual, three])
def test_models_compute_the_same_after_every_option(tmp_path, models, build, dynamic):
    path, feeds, expected = models(build, dynamic)
    drawn, rng = drawn_of(path, tmp_path, build, dynamic), random.Random(build.__name__)
    choices = [*drawn.alone(rng), *(drawn.combination(rng) for _ in range(100))]
    check_conversions(path, ["serve"], "s", feeds, expected, tmp_path, choices)


@pytest.mark.few(3)
@pytest.mark.parametrize("path", RESULTS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_tensorflow_programs_compute_the_same_after_convert(tmp_path, path):
    pytest.importorskip("google.protobuf")
    tags, key = path.stem.split("-")
    stored = np.load(path)
    feeds = {n[3:]: torch.from_numpy(stored[n]) for n in stored.files if n.startswith("in/")}
    expected = {n[4:]: torch.from_numpy(stored[n]) for n in stored.files if n.startswith("out/")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = Drawn(path.parent, tags.split("+"), key, tmp_path)
        choices = [{}, drawn.combination(random.Random(path.stem))]
        check_conversions(path.parent, tags.split("+"), key, feeds, expected, tmp_path, choices)


def test_features_of_examples_keep_their_defaults(tmp_path, run):  # noqa: F811
    pytest.importorskip("google.protobuf")
    source = FIXTURES / "tf1_examples"
    expected = np.load(source / "serve-serving_default.npz")["out/y"]
    convert(source, tmp_path / "o", int64_to_int32_conversion=True)
    text = 'inputs=[{"ids": [0, 1, 2, 3, 4, 8]}, {"ids": [5, 5, 5, 5, 5, 5]}]'
    command = ("run", "--dir", tmp_path / "o", *SERVE, "--outdir", tmp_path / "results")
    assert run(*command, "--input_examples", text)[0] == 0
    np.testing.assert_allclose(np.load(tmp_path / "results" / "y.npy"), expected, rtol=1e-5)
    index = tmp_path / "o" / "saved_model.json"
    before = index.read_text()
    for wrong in ('"defaults": {"weight": [[0.5]]}', '"defaults": {"none": [1]}', '"defaults": []'):
        written = re.sub(r'"defaults": \{.*?\}', wrong, before, flags=re.DOTALL)
        index.write_text(written)
        refused(run(*command, "--input_examples", text), "defaults")
