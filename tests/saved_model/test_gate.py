"""Check that archives with more than data in them are refused before anything of them runs."""

import io
import json
import pickle
import random
import re
import resource
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from ipu_dynamo.saved_model import load, save
from ipu_dynamo.saved_model.gate.read_program import read_program
from ipu_dynamo.saved_model.gate.refusal import Refusal
from tests.saved_model.prepared_processes import errors_of, run
from tests.saved_model.programs import (
    archive,
    branches,
    exported,
    members,
    packed,
    with_program,
)


@pytest.fixture(scope="module")
def content():
    return archive()


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def read(content):
    return read_program(memoryview(bytearray(content)))


def read_or_refused(content):
    """The program, or why there is none."""
    try:
        return read(content), ""
    except Refusal as error:
        return None, str(error)


def outputs(program):
    x = torch.ones(3, 4)
    return program.module()(x, x)


def same(program):
    return all(torch.equal(value, branches()(x := torch.ones(3, 4), x)[name])
               for name, value in outputs(program).items())  # fmt: skip


def test_a_good_archive_passes(content):
    assert same(read(content))


RAW = re.compile(r"data/(weights/weight|constants/tensor)_\d+")


def member_names():
    return [name.partition("/")[2] for name in members(archive())]


@pytest.mark.parametrize("name", member_names())
def test_a_pickle_in_any_member_is_not_loaded(content, tmp_path, name):
    canary = tmp_path / "canary"
    saved = io.BytesIO()
    torch.save(Canary(canary), saved)
    for payload in (pickle.dumps(Canary(canary)), saved.getvalue()):
        parts = members(content)
        (whole,) = [n for n in parts if n.partition("/")[2] == name]
        changed = packed({**parts, whole: payload})
        program, problem = read_or_refused(changed)
        if not RAW.fullmatch(name):  # whose bytes are numbers, whatever they say
            assert name in problem or same(program)
        assert not canary.exists()


@pytest.mark.parametrize(
    "name",
    [
        *("data/constants/custom_obj_0", "data/constants/opaque_obj_0", "data/weights/model.pt"),
        *("data/constants/model.pt", "data/aotinductor/model/a.so", "models/other.json"),
    ],
)
def test_members_that_would_be_run_are_refused(content, tmp_path, name):
    payload = pickle.dumps(Canary(tmp_path / "canary"))
    with pytest.raises(Refusal, match=name):
        read(packed({**members(content), f"archive/{name}": payload}))
    assert not (tmp_path / "canary").exists()


def change_config(kind, **values):
    def change(parts):
        (name,) = [n for n in parts if n.endswith(f"model_{kind}_config.json")]
        config = json.loads(parts[name])
        next(iter(config["config"].values())).update(values)
        return {**parts, name: json.dumps(config).encode()}

    return change


@pytest.mark.parametrize("kind", ["weights", "constants"])
@pytest.mark.parametrize(
    "values",
    [
        {"use_pickle": True},
        {"path_name": "custom_obj_0"},
        {"path_name": "../x"},
        {"tensor_meta": None},
    ],
)
def test_pickled_weights_are_refused(content, kind, values):
    with pytest.raises(Refusal, match=f"model_{kind}_config.json"):
        read(packed(change_config(kind, **values)(members(content))))


@pytest.mark.parametrize(
    ("key", "value"),
    [("sizes", 9), ("sizes", -1), ("sizes", 2**62), ("strides", 9), ("strides", 2**63 - 1)],
)
def test_tensors_reach_no_further_than_their_bytes(content, key, value):
    parts = members(content)
    (name,) = [n for n in parts if n.endswith("model_weights_config.json")]
    config = json.loads(parts[name])
    config["config"]["left.0.weight"]["tensor_meta"][key][0]["as_int"] = value
    with pytest.raises(Refusal, match="damaged"):
        read(packed({**parts, name: json.dumps(config).encode()}))


def nodes(value):
    return value["graph_module"]["graph"]["nodes"]


def rename(value, old, new):
    text = json.dumps(value).replace(json.dumps(old), json.dumps(new))
    value.clear()
    value.update(json.loads(text))


def set_size(value, text):
    sizes = value["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
    sizes[0]["as_expr"]["expr_str"] = text


def spec(value, key, tree):
    value["graph_module"]["module_call_graph"][0]["signature"][key] = json.dumps([1, tree])


LEAF = {"type": None, "context": None, "children_spec": []}
EVIL_NAME = "x):\n  import os; os.system('touch canary')\n  return (x"
CHANGES = {
    "operator of a module": lambda v: nodes(v)[1].update(target="torch.hub.load"),
    "operator of os": lambda v: nodes(v)[1].update(target="_operator.attrgetter"),
    "operator that reads files": lambda v: nodes(v)[1].update(
        target="torch.ops.aten.from_file.default"
    ),
    "operator of TorchScript": lambda v: nodes(v)[1].update(target="torch.ops.aten.save.default"),
    "operator with a loop": lambda v: nodes(v)[1].update(
        target="torch.ops.higher_order.while_loop"
    ),
    **{
        f"operator {name}": lambda v, name=name: nodes(v)[1].update(
            target=f"torch.ops.aten.{name}.default"
        )
        for name in (
            *("_sparse_csr_tensor_unsafe", "_sparse_coo_tensor_unsafe", "_to_sparse"),
            *("_nested_view_from_buffer", "mkldnn_linear", "fbgemm_linear_int8_weight", "set_"),
            *("max_pool2d_with_indices_backward", "_ctc_loss_backward", "_softmax_backward_data"),
        )
    },
    "operator that loads code": lambda v: nodes(v)[1].update(target="torch.ops.load_library"),
    "extension": lambda v: nodes(v)[1].update(target="#x:y"),
    "size that is code": lambda v: set_size(v, "__import__('os').system('touch canary')"),
    "size that takes long": lambda v: set_size(v, "Pow(Integer(9), Integer(999999999))"),
    "name that is code": lambda v: rename(v, "x", EVIL_NAME),
    **{
        f"hiding name {name}": lambda v, name=name: rename(v, "x", name)
        for name in ("torch", "math", "_operator", "device", "inf", "fx_pytree", "import", "None")
    },
    "argument that is code": lambda v: v["graph_module"]["module_call_graph"][0][
        "signature"
    ].update(forward_arg_names=[EVIL_NAME, "y"]),
    "parameter out of the module": lambda v: rename(v, "left.0.weight", "__class__.forward"),
    "container that is imported": lambda v: spec(
        v,
        "out_spec",
        {"type": "collections.defaultdict", "context": '["os", "x"]', "children_spec": [LEAF]},
    ),
    "keys that are enumerations": lambda v: spec(
        v,
        "out_spec",
        {
            "type": "builtins.dict",
            "context": '[{"__enum__": true, "fqn": "os:path", "name": "x"}]',
            "children_spec": [LEAF],
        },
    ),
    "range that is counted to": lambda v: v["range_constraints"].update(
        u999999999={"min_val": 0, "max_val": 1}
    ),
    **{
        f"range {key!r}": lambda v, key=key: v["range_constraints"].update(
            {key: {"min_val": 0, "max_val": 1}}
        )
        for key in ("u 999999", "u+999999", "zuf 999999", "u", "u*9", "zuf(7)", "u000001")
    },
    "range that is code": lambda v: v["range_constraints"].update(
        {"__import__": {"min_val": 0, "max_val": 1}}
    ),
    "newer schema": lambda v: v["schema_version"].update(major=9),
    "unknown field": lambda v: v.update(extra=1),
    "unknown verifier": lambda v: v.update(verifiers=["EVIL"]),
    "another device": lambda v: rename(v, "cpu", "cuda"),
    "missing field": lambda v: v["graph_module"].pop("signature"),
    "wrong type": lambda v: v["graph_module"]["graph"].update(nodes={}),
    "deep notes": lambda v: nodes(v)[1]["metadata"].update(custom="[" * 5000),
    "custom object": lambda v: v["graph_module"]["graph"].update(
        custom_obj_values={"x": {"name": "x", "class_fqn": "y"}}
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_programs_that_are_more_than_data_are_refused(content, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    part = r"model\.json: operator '" if kind.startswith(("operator", "extension")) else None
    part = "is no name of a value: " if kind.startswith("hiding") else part
    with pytest.raises(Refusal, match=part):  # by the gate, and not by what PyTorch does later
        read(with_program(content, CHANGES[kind]))
    assert not list(tmp_path.iterdir())


def test_guards_and_functions_of_a_file_are_dropped(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def change(value):
        value["guards_code"] = ["open('canary', 'w')"]
        nodes(value)[1]["metadata"]["source_fn_stack"] = "x,torch.hub.load"

    program = read(with_program(content, change))
    assert same(program)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("position", range(0, 20))
def test_a_flipped_bit_is_seen_or_does_not_matter(content, position):
    changed = bytearray(content)
    at = random.Random(position).randrange(len(content))
    changed[at] ^= 1 << position % 8
    program, problem = read_or_refused(changed)
    assert problem or same(program)


def test_zip_files_that_lie_are_refused(content):
    parts = members(content)
    with pytest.raises(Refusal, match="compressed"):
        read(packed(parts, zipfile.ZIP_DEFLATED))
    for name in ("../x", "archive/../x", "/x", "archive\\x", "C:/x"):
        with pytest.raises(Refusal):
            read(packed({**parts, name: b""}))
    file = io.BytesIO(content)
    with zipfile.ZipFile(file, "a") as target, pytest.warns(UserWarning, match="Duplicate"):
        target.writestr(next(iter(parts)), b"")
    with pytest.raises(Refusal, match="twice"):
        read(file.getvalue())
    for size in (0, 10, len(content) // 2, len(content) - 1):
        with pytest.raises(Refusal):
            read(content[:size])
    old = {n: c for n, c in parts.items() if not n.endswith("archive_format")}
    with pytest.raises(Refusal, match=r"save it again with torch 2\.8"):
        read(packed(old))


def _changed(value, draw):
    """A program with a value replaced, or a part left out or moved."""
    places = []

    def walk(part):
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            places.append((part, key))
            if isinstance(item, dict | list):
                walk(item)

    walk(value)
    part, key = draw.choice(places)
    other, other_key = draw.choice(places)
    odd = [
        None,
        True,
        -1,
        2**63,
        2**70,
        1e300,
        "",
        "x",
        "torch.os.system",
        [],
        {},
        other[other_key],
    ]
    if isinstance(part, dict) and draw.random() < 0.3:
        del part[key]
    else:
        part[key] = draw.choice(odd)


def _mutate(content, seed):
    """Read a changed program, and run it if it is read."""
    draw = random.Random(seed)
    try:
        program = read(with_program(content, lambda value: _changed(value, draw)))
    except Refusal:
        return "refused"
    try:
        outputs(program)
    except Exception as error:
        return type(error).__name__
    return "read"


def try_all(count):
    """Print what becomes of changed programs, in a gigabyte of memory and six seconds for each."""
    content = archive()
    outputs(read(content))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
    for seed in range(count):
        limit = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 6
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        print(seed, _mutate(content, seed), flush=True)


def check_mutations(output, count):
    status = run(try_all, count, output=output, seconds=3000)
    assert status == 0, errors_of(output)[-2000:]
    results = [line.split()[1] for line in output.read_text().splitlines()]
    assert len(results) == count
    assert results.count("refused") > count // 4


def test_changed_programs_are_refused_or_run(tmp_path):
    check_mutations(tmp_path / "output", 100)


@pytest.mark.slow
def test_many_changed_programs_are_refused_or_run(tmp_path):
    check_mutations(tmp_path / "output", 1000)


class WithAutocast(nn.Module):
    def __init__(self, enabled):
        super().__init__()
        self.layer, self.enabled = nn.Linear(4, 4), enabled

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            return self.layer(x)


def test_what_save_writes_passes_the_gate(tmp_path):
    x = torch.randn(2, 4)
    save(tmp_path / "off", {"s": (model := WithAutocast(False), (x,))})
    assert torch.equal(load(tmp_path / "off")["s"](x=x)["output_0"], model(x))
    with pytest.raises(ValueError, match="autocast"):
        save(tmp_path / "on", {"s": (WithAutocast(True), (x,))})


def test_trust_is_the_users_word(tmp_path, monkeypatch):
    def change(value):
        value["extra"] = 1  # PyTorch does not look at it

    path = tmp_path / "a.pt2"
    path.write_bytes(with_program(archive(exported()), change))
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"a\.pt2: models/model\.json.*--trust"):
        load(path)
    assert load(path, trust=True)["serving_default"](x=x, y=x)
    monkeypatch.setenv("IPU_DYNAMO_TRUST", "1")
    assert load(path)["serving_default"](x=x, y=x)
