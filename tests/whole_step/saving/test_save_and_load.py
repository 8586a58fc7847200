"""Check what is saved of a compiled model, what is refused, and how a loaded one is used."""

import collections
import copy
import zipfile
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ipu_dynamo
from ipu_dynamo import (
    InputError,
    IpuError,
    LoadedModel,
    Reason,
    SavedProgramError,
    compile_inference,
    compile_training,
    load,
    load_entries,
    save,
)
from ipu_dynamo.ops.operators import operator_named
from ipu_dynamo.options import Anchor
from ipu_dynamo.saved.archive import Archive, write_archive
from ipu_dynamo.saved.operator_list import check_operators

Result = collections.namedtuple("Result", "loss scores")
ipu_dynamo.register_named_tuple(Result)
EAGER = {"engine": "eager"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.twin = self.layer
        self.unread = nn.Parameter(torch.ones(2))
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self, x, y=None, *, parts=1):
        scores = self.layer(x) * self.scratch
        if y is None:
            return {"scores": scores, "all": [scores + i for i in range(parts)], "none": (None, 3)}
        return Result(F.cross_entropy(scores, y), scores)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved"


def trained(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, EAGER | options, loss=0)
    step(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
    return step


def test_a_loaded_model_answers_as_the_model(model, path):
    run = compile_inference(model, EAGER)
    expected = run(torch.ones(2, 3), parts=2)
    save(run, path)
    loaded = load(path)
    found = loaded(torch.ones(2, 3), parts=2)
    assert found.keys() == expected.keys()
    assert found["none"] == (None, 3)
    assert torch.equal(found["all"][1], expected["all"][1])
    assert isinstance(loaded, LoadedModel)
    assert isinstance(loaded, ipu_dynamo.CompiledModel)
    assert str(loaded.program) == str(run.program)


def test_names_and_anchors_of_values_are_kept(model, path):
    anchors = {
        "inner": Anchor("layer/Add:0", returns="all"),
        "gradient": Anchor("layer.weight", "gradient"),
        "before": Anchor("layer.bias", returns="sum"),
    }
    run = trained(model, anchors=anchors, device_iterations=2)
    save(run, path)
    loaded = load(path)
    variables = tuple(name for name in run.value_names.variables if name != "unread")
    assert loaded.value_names == replace(run.value_names, variables=variables)
    given = torch.randn(4, 3), torch.tensor([0, 1, 1, 1])
    run(*given), loaded(*given)
    for name in anchors:
        assert torch.equal(loaded.anchored(name), run.anchored(name))


def test_calls_have_to_fit(model, path):
    run = compile_inference(model, EAGER)
    run(torch.ones(2, 3), parts=2)
    save(run, path)
    loaded = load(path)
    with pytest.raises(InputError, match="Value mismatch for parts: expected 2 but got 3"):
        loaded(torch.ones(2, 3), parts=3)
    with pytest.raises(InputError, match="Shape mismatch for x"):
        loaded(torch.ones(5, 3), parts=2)
    with pytest.raises(InputError, match="Data type mismatch for x"):
        loaded(torch.ones(2, 3).int(), parts=2)


def test_the_state_is_that_of_the_model(model, path):
    save(trained(model), path)
    loaded = load(path)
    state = loaded.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert state["twin.weight"] is state["layer.weight"]
    Net().load_state_dict(state)


def test_a_state_can_be_loaded(model, path):
    run = compile_inference(model, EAGER)
    run(torch.ones(2, 3))
    save(run, path)
    loaded, other = load(path), Net()
    loaded.load_state_dict(other.state_dict())
    assert torch.equal(loaded(torch.ones(2, 3))["scores"], other(torch.ones(2, 3))["scores"])
    with pytest.raises(InputError, match="lacks, or should not have: unread"):
        loaded.load_state_dict({k: v for k, v in other.state_dict().items() if k != "unread"})
    wrong = other.state_dict() | {"unread": torch.ones(3)}
    with pytest.raises(InputError, match=r"unread has shape \[3\], and \[2\] here"):
        loaded.load_state_dict(wrong)


def test_numbers_of_the_optimizer_are_set_by_name(model, path):
    x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    step = trained(model)
    save(step, path)
    loaded = load(path)
    assert loaded.hyperparameters[0]["lr"] == 0.1
    loaded.set_hyperparameters(lr=0.5)
    found = loaded(x, y)
    assert isinstance(found, Result)
    reference = Net()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    reference(x, y).loss.backward()
    optimizer.step()
    torch.testing.assert_close(loaded.state_dict()["layer.weight"], reference.layer.weight.data)
    for wrong, match in (
        ({"rate": 1.0}, "no number rate; it has lr, momentum"),
        ({"lr": "fast"}, "'fast', which is no number"),
        ({"momentum": 0.9}, "compiled without momentum"),
        ({"group": 1, "lr": 1.0}, "no group 1, of 1"),
    ):
        with pytest.raises(InputError, match=match):
            loaded.set_hyperparameters(**wrong)
    assert loaded.hyperparameters[0]["lr"] == 0.5


def test_what_needs_python_says_so(model, path):
    save(trained(model), path)
    loaded = load(path)
    with pytest.raises(IpuError, match="set_hyperparameters"):
        loaded.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(IpuError, match="is compiled"):
        loaded.compile(torch.ones(4, 3))


def test_entry_points_share_their_weights(model, path):
    x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    step, check = trained(model), compile_inference(model, EAGER)
    check(x)
    save({"train": step, "validate": check}, path)
    entries = load_entries(path)
    before = entries["validate"](x)["scores"]
    entries["train"](x, y)
    after = entries["validate"](x)["scores"]
    step(x, y)
    assert torch.equal(after, check(x)["scores"])
    assert not torch.equal(before, after)
    with pytest.raises(SavedProgramError, match="several entry points: train, validate"):
        load(path)
    with pytest.raises(SavedProgramError, match="no entry point 'test', but train, validate"):
        load(path, "test")
    assert torch.equal(load(path, "validate")(x)["scores"], before)
    with zipfile.ZipFile(path) as file:  # weights are there once
        once = file.getinfo("weights.safetensors").file_size
    save(step, path)
    with zipfile.ZipFile(path) as file:
        assert file.getinfo("weights.safetensors").file_size == once


def test_entry_points_with_other_weights_of_one_name_are_refused(model, path):
    check = compile_inference(Net(), EAGER)
    check(torch.ones(4, 3))
    with pytest.raises(SavedProgramError, match="is another tensor in another entry point"):
        save({"train": trained(model), "validate": check}, path)
    assert not path.exists()


def test_own_weights_stay_apart(model, path):
    run = compile_inference(model, EAGER, own_weights=True)
    expected = run(torch.ones(2, 3))["scores"]
    nn.init.zeros_(model.layer.weight)  # the program has copies
    save(run, path)
    loaded = load(path)
    assert torch.equal(loaded(torch.ones(2, 3))["scores"], expected)
    loaded.load_state_dict(model.state_dict())
    assert not torch.equal(loaded(torch.ones(2, 3))["scores"], expected)


def refused(compiled, path):
    with pytest.raises(SavedProgramError) as caught:
        save(compiled, path)
    assert caught.value.reason is Reason.CANNOT_SAVE
    assert not path.exists()
    return str(caught.value)


def test_other_things_are_refused(model, path):
    assert "has no program yet" in refused(compile_inference(model, EAGER), path)
    assert "aot_compile" in refused(torch.compile(model, backend="ipu"), path)
    assert "aot_compile" in refused(torch.compile(lambda x: x, backend="ipu"), path)
    assert "compile_training" in refused(model, path)
    assert "entry points are named" in refused({"../x": trained(model)}, path)
    assert "entry points are named" in refused({}, path)


def test_results_that_no_file_holds_are_refused(path):
    def model(x):
        return {"y": [x + 1, {1, 2}]}

    run = compile_inference(model, EAGER)
    run(torch.ones(2))
    text = refused(run, path)
    assert "what the model returns['y'][1] is a builtins.set" in text


def test_arguments_that_no_file_holds_are_refused(path):
    run = compile_inference(lambda x, kind: x + 1, EAGER)
    run(torch.ones(2), kind=Net)
    assert "argument kind is a builtins.type" in refused(run, path)


def test_operators_of_others_are_refused(path):
    library = torch.library.Library("others", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("others::twice", lambda x: torch.empty_like(x), lib=library)
    run = compile_inference(lambda x: torch.ops.others.twice(x), EAGER)
    run(torch.ones(2))
    text = refused(run, path)
    assert "the operator others.twice.default is none of aten" in text
    assert "test_save_and_load.py" in text


def changed(path, member, old, new):
    """Exchange a part of a member, with sums computed anew."""
    with Archive(path) as archive:
        members = {name: archive.read(name, 1 << 30) for name in archive.names}
        head = archive.head
    assert old in members[member]
    members[member] = members[member].replace(old, new)
    write_archive(path, members, head)


@pytest.mark.parametrize(
    ("member", "old", "new", "reason"),
    [
        ("operators.json", b"aten.mul.Tensor", b"aten.mul.Other", Reason.OPERATOR),
        ("operators.json", b"Tensor other) -> Tensor", b"Tensor b) -> Tensor", Reason.OPERATOR),
        ("entries/program/program.txt", b"replicas=1", b"replicas=2", Reason.CONTENT),
        ("entries/program/program.txt", b"form ", b"form 9", Reason.CONTENT),
        ("entries/program/entry.json", b'"x"', b'"z"', Reason.CONTENT),
        ("entries/program/entry.json", b'"seed": 0', b'"seed": "0"', Reason.CONTENT),
        ("entries/program/entry.json", b'"cpu"', b'"cuda:63"', Reason.DEVICE),
        ("weights.json", b"layer.weight", b"layer.width", Reason.CONTENT),
        ("weights.json", b'"views": {}', b'"views": []', Reason.CONTENT),
        (
            "weights.json",
            b'"layer.weight",\n   "layer.weight"',
            b'"layer.weight",\n   []',
            Reason.CONTENT,
        ),
        (
            "entries/program/entry.json",
            b'"engine": "eager"\n }',
            b'"engine": "eager",\n  "replicas": 100000000000\n }',
            Reason.CONTENT,
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(model, path, member, old, new, reason):
    run = compile_inference(model, EAGER)
    run(torch.ones(2, 3))
    save(run, path)
    changed(path, member, old, new)
    with pytest.raises(SavedProgramError) as caught:
        load(path)
    assert caught.value.reason is reason, caught.value
    assert caught.value.path == str(path)
    assert caught.value.part.startswith(member.rpartition("/")[0])


@pytest.mark.parametrize(
    "name",
    [
        "os.system.x",
        "aten.set_.source_Tensor",
        "aten.from_file.default",
        "others.x.y",
        "x",
        "aten._sparse_coo_tensor_unsafe.default",
        "aten.mkldnn_rnn_layer.default",
        "aten.mkldnn_rnn_layer_backward.default",
        "ipu.onednn_lstm.default",
        "ipu.onednn_lstm_backward.default",
        "mkl._mkl_linear.default",
        "mkldnn._linear_pointwise.default",
    ],
)
def test_no_file_names_other_operators(name):
    try:
        schema = str(operator_named(name)._schema)  # not refused because of another schema
    except ValueError:
        schema = ""
    with pytest.raises(SavedProgramError) as caught:
        check_operators({name: schema})
    assert caught.value.reason is Reason.OPERATOR


def test_what_only_this_machine_calls_is_in_no_file(tmp_path):
    """oneDNN computes the layer here, in a program that is saved without it, and in a cache."""
    options = {"engine": "eager", "program_cache": str(tmp_path / "programs")}
    run, x = compile_inference(nn.LSTM(3, 4), options), torch.randn(2, 3, 3)
    expected = run(x)[0]
    save(run, tmp_path / "lstm.ipu")
    again = compile_inference(copy.deepcopy(run.model), options)
    assert torch.equal(again(x)[0], expected)
    loaded = load(tmp_path / "lstm.ipu")
    assert torch.equal(loaded(x)[0], expected)
    for each in (run, again, loaded):
        functions = each.executable.host_program.inlined.functions
        targets = {str(node.target) for function in functions for node in function.operators}
        assert "ipu.onednn_lstm.default" in targets
    (kept,) = (tmp_path / "programs").glob("*.program")
    for path in (kept, tmp_path / "lstm.ipu"):
        assert b"ipu.lstm" in path.read_bytes()
        assert b"onednn_lstm" not in path.read_bytes()


def test_a_machine_that_differs_decides_by_itself(model, path, caplog):
    run = compile_inference(model, EAGER)
    expected = run(torch.ones(2, 3))["scores"]
    save(run, path)
    changed(path, "entries/program/entry.json", b'"float32": "highest"', b'"float32": "other"')
    with caplog.at_level("INFO", "ipu_dynamo.program"):
        loaded = load(path)
    assert "saved by another float32" in caplog.text
    assert torch.equal(loaded(torch.ones(2, 3))["scores"], expected)


def test_random_numbers_go_on(path):
    def model(x):
        return F.dropout(x, 0.5)

    run = compile_inference(model, EAGER)
    run(torch.ones(50))
    save(run, path)
    loaded = load(path)
    assert torch.equal(run(torch.ones(50)), loaded(torch.ones(50)))
    assert not torch.equal(loaded(torch.ones(50)), loaded(torch.ones(50)))


def test_free_rows_are_saved_and_proven_again(path):
    """What a file says of its rows is believed of a program that allows it only."""
    layer, mixed = (
        compile_inference(nn.Linear(3, 2), EAGER),
        compile_inference(lambda x: x + 1, EAGER),
    )
    norms = compile_inference(lambda x: x - x.mean(0), EAGER)
    for one in (layer, mixed, norms):
        one(torch.randn(4, 3))
    save({"layer": layer, "fixed": mixed}, path, free_rows=["layer"])
    save(load_entries(path), path)  # it stays
    entries = load_entries(path)
    x = torch.randn(9, 3)
    torch.testing.assert_close(entries["layer"](x), layer.model(x))
    with pytest.raises(InputError, match="Shape mismatch"):
        entries["fixed"](x)
    with pytest.raises(ipu_dynamo.CompileError, match="may mix rows"):
        save(norms, path, free_rows=True)
    with pytest.raises(SavedProgramError, match="names 'other'"):
        save(layer, path, free_rows=["other"])
    save(norms, path)
    changed(path, "entries/program/entry.json", b'"free_rows": false', b'"free_rows": true')
    with pytest.raises(SavedProgramError, match="its rows are not free") as error:
        load(path)
    assert error.value.reason is Reason.CONTENT
