"""Check that a checkpoint is complete or refused by name, also after a writer was killed."""

import json
import os
import pickle
import shutil
import signal
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import (
    InputError,
    IpuError,
    Reason,
    SavedProgramError,
    compile_inference,
    compile_training,
    latest_checkpoint,
    load,
    load_checkpoint,
    save,
    save_checkpoint,
)
from tests.whole_step.saving.rough import Canary

TENSORS, INDEX = "rank-0000-of-0001.safetensors", "model.safetensors.index.json"
PACKAGE = Path(save_checkpoint.__code__.co_filename).parents[2]
WRITERS = (
    f"{PACKAGE / 'saved'}{os.sep}",
    f"{PACKAGE / 'whole_step' / 'checkpoints'}{os.sep}",
    f"{PACKAGE / 'replace_file.py'}",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
        self.same = self.layer
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self, x, y):
        return F.cross_entropy(self.head(torch.tanh(self.layer(x)) * self.scratch), y)


def made(update="program", **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return compile_training(model, optimizer, {"engine": "eager"} | options, update=update)


def trained(calls=1, update="program"):
    step = made(update)
    for _ in range(calls):
        call(step)
    return step


def call(step):
    return step(torch.ones(2, 4), torch.tensor([0, 1]))


@pytest.fixture
def path(tmp_path):
    return save_checkpoint(tmp_path / "runs", trained(), {"epoch": 3})


def refused(folder, reason, file):
    step = made()
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    with pytest.raises(SavedProgramError) as caught:
        load_checkpoint(folder, step)
    assert caught.value.reason is reason, caught.value
    assert caught.value.path == str(file)
    assert all(torch.equal(t, before[name]) for name, t in step.model.state_dict().items())
    return str(caught.value)


FILES = ["checkpoint.json", INDEX, TENSORS]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(name, path):
    (path / name).unlink()
    refused(path.parent, Reason.MISSING, path / name)


@pytest.mark.parametrize("name", FILES)
def test_a_cut_or_longer_file_is_refused(name, path):
    content = (path / name).read_bytes()
    for changed in (content[:-1], content[: len(content) // 2], b"", content + b" "):
        (path / name).write_bytes(changed)
        refused(path, Reason.DAMAGED, path / name)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_refused(name, path):
    content = bytearray((path / name).read_bytes())
    for place in range(0, len(content), max(1, len(content) // 20)):
        changed = content.copy()
        changed[place] ^= 1 << place % 8
        (path / name).write_bytes(changed)
        with pytest.raises(SavedProgramError) as caught:
            load_checkpoint(path, made())
        assert caught.value.path == str(path / name)


def test_a_changed_number_in_the_head_is_refused(path):
    head = path / "checkpoint.json"
    content = head.read_text()
    assert '"epoch": 3' in content
    head.write_text(content.replace('"epoch": 3', '"epoch": 4'))
    refused(path, Reason.DAMAGED, head)


@pytest.mark.parametrize("text", ["", "../../elsewhere\n", "checkpoint-1\n", "\x00\xff"])
def test_a_changed_latest_is_refused(text, path):
    (path.parent / "latest").write_text(text)
    refused(path.parent, Reason.DAMAGED, path.parent / "latest")


def test_other_folders_are_refused(path, tmp_path):
    refused(tmp_path, Reason.MISSING, tmp_path / "checkpoint.json")
    save(trained(), tmp_path / "file")
    refused(tmp_path / "file", Reason.FOREIGN, tmp_path / "file" / "checkpoint.json")


@pytest.mark.parametrize("name", [*FILES, "latest", "data.pkl", "model.bin"])
def test_a_planted_pickle_does_not_run(name, path, tmp_path):
    target = path.parent / name if name == "latest" else path / name
    target.write_bytes(pickle.dumps(Canary(str(tmp_path / "canary"))))
    try:
        load_checkpoint(path.parent, made())
        assert name not in (*FILES, "latest")
    except SavedProgramError as error:
        assert error.path == str(target)  # noqa: PT017
    assert not (tmp_path / "canary").exists()
    pickle.loads(pickle.dumps(Canary(str(tmp_path / "canary"))))
    assert (tmp_path / "canary").exists()  # as it would


def lines_until(number, action):
    """Run `action`, and kill this process at a line of what writes files; count them."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(WRITERS):
            return None
        if event == "line":
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


def killed(number, action):
    """Run `action` in a child that is killed at a line; whether it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that pytest may have
        child = os.fork()
    if child == 0:
        try:
            lines_until(number, action)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_killed_writer_leaves_a_complete_checkpoint(tmp_path):
    kill_writers(tmp_path, 6)


@pytest.mark.slow
def test_a_writer_that_is_killed_at_many_places_leaves_a_complete_checkpoint(tmp_path):
    kill_writers(tmp_path, 50)


def kill_writers(folder, places):
    old, new = trained(1), trained(2)
    total = lines_until(0, lambda: save_checkpoint(folder / "counted", new, "new"))
    assert total > 100
    runs, kinds = folder / "runs", []
    other = made()
    for place in range(places):
        shutil.rmtree(runs, ignore_errors=True)
        save_checkpoint(runs, old, "old")
        number = 1 + place * (total - 1) // (places - 1)
        assert killed(number, lambda: save_checkpoint(runs, new, "new"))
        kinds.append(load_checkpoint(runs, other))
        expected = {"old": old, "new": new}[kinds[-1]]
        for name, tensor in other.model.state_dict().items():
            assert torch.equal(tensor, expected.model.state_dict()[name]), (number, name)
        last = save_checkpoint(runs, new, "last")  # which removes what was left
        assert load_checkpoint(runs, other) == "last"
        left = {path.name for path in runs.iterdir()} - {"latest"}
        assert all(name.startswith("checkpoint-") for name in left), left
        assert last.name == max(left)
    assert {*kinds} == {"old", "new"}
    assert sorted(kinds, reverse=True) == kinds  # first the old ones


def test_nobody_removes_what_another_process_writes(tmp_path, monkeypatch):
    """A second writer meanwhile, which finds an unfinished folder."""
    step, real = trained(), os.fsync
    told = []

    def fsync(handle):
        if not told:
            told.append(tmp_path)
            child = os.fork()
            if child == 0:
                try:
                    save_checkpoint(tmp_path, step, "child")
                except OSError:
                    os._exit(3)  # the number is taken
                os._exit(0)
            told.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    save_checkpoint(tmp_path, step, "parent")
    assert load_checkpoint(tmp_path, step) == "parent"
    assert told[1] == 3


def test_safetensors_reads_the_weights(path):
    index = json.loads((path / INDEX).read_text())
    step = trained()
    state = step.model.state_dict()
    assert index["weight_map"] == dict.fromkeys(
        ["layer.weight", "layer.bias", "head.weight"], TENSORS
    )
    tensors = safetensors.torch.load_file(path / TENSORS)
    for name in index["weight_map"]:
        assert torch.equal(tensors[name], state[name])
    nbytes = sum(tensors[name].nbytes for name in index["weight_map"])
    assert index["metadata"]["total_size"] == nbytes
    states = {f"{name}.{key}" for name in index["weight_map"] for key in ("exp_avg", "step")}
    assert states <= tensors.keys()
    assert not any(name.startswith("same.") for name in tensors)


@pytest.mark.slow
def test_transformers_reads_the_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = compile_training(model, optimizer, {"engine": "eager"}, loss=0)
    ids = torch.arange(8)[None]
    step(input_ids=ids, labels=ids, use_cache=False, return_dict=False)
    path = save_checkpoint(tmp_path, step)
    config.save_pretrained(path)
    again, told = transformers.GPT2LMHeadModel.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["mismatched_keys"]
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ({"epoch": (1, 2)}, r"extra\['epoch'\] is \(1, 2\)"),
        ({"milestones": {30: 1}}, r"extra\['milestones'\] is a dict with keys other than strings"),
        ([1, [torch.ones(1)]], r"extra\[1\]\[0\] is tensor"),
        (float("nan"), "extra is nan"),
        ({"x": b"x"}, r"extra\['x'\] is b'x'"),
    ],
)
def test_what_json_would_change_is_refused(extra, where, tmp_path):
    with pytest.raises(InputError, match=where):
        save_checkpoint(tmp_path, trained(), extra)
    assert not any(tmp_path.iterdir())


def test_extra_comes_back_equal(tmp_path):
    extra = {"a": [1, -2.5, None, True, "ü\n\x00"], "b": {"": 2**70}, "c": 0.1}
    assert load_checkpoint(save_checkpoint(tmp_path, trained(), extra), made()) == extra


def test_what_has_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="the step has no program yet"):
        save_checkpoint(tmp_path, made())
    with pytest.raises(SavedProgramError, match='with update="host"') as caught:
        save_checkpoint(tmp_path, trained(update="host"))
    assert caught.value.reason is Reason.CANNOT_SAVE
    for action in (save_checkpoint, load_checkpoint):
        with pytest.raises(InputError, match="a program for inference has no checkpoints"):
            action(tmp_path, compile_inference(Net()))
        with pytest.raises(InputError, match=r"Net has no checkpoints"):
            action(tmp_path, Net())
    step = trained()
    step.model.head.weight = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(InputError, match="was replaced"):
        save_checkpoint(tmp_path, step)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("action", [save_checkpoint, load_checkpoint])
def test_nothing_is_saved_or_loaded_within_a_call(action, path):
    step, batch = trained(), (torch.ones(2, 4), torch.tensor([0, 1]))
    with pytest.raises(IpuError, match="a call is running around this"):
        step(*batch, on_send=lambda *_: action(path.parent, step))
    assert latest_checkpoint(path.parent) == path


def test_a_loaded_program_has_checkpoints(path, tmp_path):
    """Between a program that `save` wrote and the step that it was."""
    save(trained(), tmp_path / "program")
    loaded, step = load(tmp_path / "program"), trained()
    call(loaded), call(step)
    assert load_checkpoint(path, loaded) == {"epoch": 3}
    again = trained()
    assert torch.equal(call(loaded), call(again))
    load_checkpoint(save_checkpoint(tmp_path / "runs", loaded), step)
    assert torch.equal(call(step), call(again))
    for name, tensor in step.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])
