"""Check that files of form 4 are read, go on as they did, and are written in the form of today."""

import json

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo.program.ir.made_names import is_made
from ipu_dynamo.saved.archive import FORM, OLDEST, Archive
from ipu_dynamo.saved.form_4 import parse_form_4
from ipu_dynamo.saved.tensors import read_tensors
from tests.whole_step.saving import form_4

LOSSES = json.loads((form_4.FOLDER / "losses.json").read_text())


@pytest.mark.parametrize("name", form_4.CASES)
def test_a_file_of_form_4_goes_on_as_it_did(name, tmp_path):
    loaded = ipu_dynamo.load(form_4.FOLDER / f"{name}.saved")
    ipu_dynamo.save(loaded, tmp_path / "saved")
    again = ipu_dynamo.load(tmp_path / "saved")
    for model in (loaded, again):
        torch.testing.assert_close(form_4.losses(model, form_4.CALLS), LOSSES[name])
    with Archive(tmp_path / "saved") as new, Archive(form_4.FOLDER / f"{name}.saved") as old:
        assert (old.form, new.form) == (OLDEST, FORM) == (4, 5)
        for member in ("weights.safetensors", "optimizer.safetensors"):
            assert read_tensors(old, member).keys() == read_tensors(new, member).keys()


def test_a_file_of_form_4_goes_on_as_plain_pytorch():
    model, optimizer, _ = form_4.begin("two_stages")
    losses = []
    for call in range(2 * form_4.CALLS):
        parts = []
        for x, y in zip(*(tensor.split(2) for tensor in form_4.batch(call)), strict=True):
            parts.append(model(x, y))
            (parts[-1] / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parts[-1].item())
    loaded = ipu_dynamo.load(form_4.FOLDER / "two_stages.saved")
    torch.testing.assert_close(form_4.losses(loaded, form_4.CALLS), losses[form_4.CALLS :])
    state = loaded.state_dict()
    torch.testing.assert_close({**state}, {**model.state_dict()})


@pytest.mark.parametrize("name", form_4.CASES)
def test_names_of_form_4_become_those_that_are_made_today(name):
    _, _, step = form_4.begin(name)
    step.compile(*form_4.batch(0))
    loaded = ipu_dynamo.load(form_4.FOLDER / f"{name}.saved")
    every = [str(variable) for variable in loaded.program.variables]
    assert every == [str(variable) for variable in step.program.variables]
    assert any(is_made(variable.name) for variable in loaded.program.variables)


def test_an_executor_of_form_4_is_read(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    executor = form_4.executor()
    executor.loadExecutable(str(form_4.FOLDER / "executor.saved"))
    torch.testing.assert_close(form_4.losses(executor, 0), LOSSES["executor"])


def test_a_parameter_called_as_a_made_name_keeps_its_own():
    with Archive(form_4.FOLDER / "two_stages.saved") as archive:
        text = archive.read("entries/program/program.txt", 1 << 20).decode()
    program = parse_form_4(text.replace('"first.bias', '"mm.on1'), {})
    kinds = {variable.name: variable.kind for variable in program.variables}
    assert kinds["mm.on1"] == "parameter"
    assert kinds["mm.on1..grad"] == "accumulator"
    assert kinds["mm.on1..momentum_buffer"] == "state"
    assert "mm..on0" in {i.result for i in program.copies}
