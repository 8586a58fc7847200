"""Check what `inspect` shows of whole steps and of loaded programs."""

import re
import warnings

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import BeginBlock, IpuError, Options, compile_inference, explain, inspect
from ipu_dynamo.inspection import program_entry
from ipu_dynamo.report.views.page_view import page_view
from tests.inspection.looking import EAGER, check_members, nothing_changes, pipeline

X = torch.arange(96.0).reshape(12, 8) / 96


@pytest.fixture(scope="module")
def trained():
    step = pipeline(workers=1)
    step(X)
    return step


def test_members_of_a_training_step(trained, monkeypatch):
    with nothing_changes(monkeypatch, trained.model):
        seen = check_members(trained)
    (entry,) = seen.programs
    assert entry is seen.program
    assert entry.text == str(trained.program)
    assert [row.ipu for row in seen.cut.rows] == [0, 1, 2]
    assert [row.layers for row in seen.cut.rows] == [("layers.0",), ("layers.1",), ("layers.2",)]
    assert (
        repr(seen)
        == repr(trained)
        == ("<training step of Chain: 3 stages on 3 IPUs, 6 micro-batches>")
    )


def test_ipu_and_this_computer_differ_where_values_are_kept(trained):
    entry = inspect(trained).program
    assert len(entry.schedule.workers) == 3
    assert len(entry.host.schedule.workers) == 1
    assert any(decision.by == "KeepValues" for decision in entry.host.decisions)
    assert "again: " in entry.text
    assert not any(function.repetitions for function in entry.host.program.runs.functions)
    lines = str(entry).splitlines()
    assert all(line.startswith(("  IPU: ", "  this computer: ")) for line in lines[5:])
    assert "bytes (IPU)" in lines[1]


def test_bytes_of_a_stage_are_those_of_its_variables_and_its_stash(trained):
    entry = inspect(trained).program
    for row, kept in zip(entry.cut.rows, entry.stash, strict=True):
        own = sum(v.held.nbytes for v in entry.program.variables if v.ipu == row.ipu)
        stash = kept.copies * sum(type_.nbytes for _, type_ in kept.values)
        assert row.nbytes == own + stash


def test_two_stages_of_one_ipu_share_its_variables():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4))
    for ipu, layer in zip((0, 1, 0), model, strict=True):
        BeginBlock(layer, ipu_id=ipu)
    step = compile_inference(model, Options(**EAGER))
    step(torch.ones(2, 4))
    sizes = [sum(4 * p.numel() for p in layer.parameters()) for layer in model]
    assert [row.nbytes for row in inspect(step).cut.rows] == sizes


def test_times_are_measured_once_a_call_was_recorded():
    step = pipeline(record="timeline", workers=1)
    step.compile(X)
    seen = inspect(step)
    assert (seen.program.host.timeline, seen.cut.measured) == (None, False)
    assert "estimated" in str(seen.cut)
    step(X)
    seen = inspect(step)
    assert seen.program.host.timeline.spans
    assert "measured" in str(seen.cut)
    assert all(row.milliseconds > 0 for row in seen.cut.rows)


def test_without_a_program_it_says_what_to_do(monkeypatch):
    step = pipeline()
    with nothing_changes(monkeypatch, step.model):
        seen = check_members(step)
    assert "not compiled yet; call it, or `explain(x, *inputs)`" in str(seen)
    assert seen.program is None
    assert "not compiled yet" in seen.why_absent("cut")
    assert not step.is_compiled
    with pytest.raises(IpuError, match="not compiled yet"):
        step.explain()


def test_explain_lowers_a_copy_and_runs_no_step(monkeypatch):
    step = pipeline()
    before = [p.clone() for p in step.model.parameters()]
    with nothing_changes(monkeypatch, step.model):
        explained = explain(step, X)
    assert not step.is_compiled
    assert all(map(torch.equal, step.model.parameters(), before))
    assert "Chain: 3 stages on 3 IPUs, 6 micro-batches" in str(explained)
    assert explained.program.host.schedule is None
    step(X)
    assert explained.program.text == inspect(step).program.text
    assert str(explain(step, X)) == str(inspect(step))


def test_warnings_of_a_compilation_are_reasons_also_if_they_are_hidden(recwarn):
    table = torch.ones(4)
    step = compile_inference(lambda x: x + table, Options(**EAGER))
    with warnings.catch_warnings(action="ignore"):
        step(torch.zeros(2, 4))
    (reason,) = inspect(step).reasons
    assert reason.kind == "warning"
    assert "becomes a constant" in reason.text
    assert not recwarn.list


def test_members_of_a_loaded_program(trained, tmp_path, monkeypatch):
    ipu_dynamo.save(trained, tmp_path / "step.zip")
    loaded = ipu_dynamo.load(tmp_path / "step.zip")
    with nothing_changes(monkeypatch):
        seen = check_members(loaded)
    assert seen.program.text == inspect(trained).program.text
    assert repr(loaded).startswith("<training step of a saved model: 3 stages on 3 IPUs")
    assert [row.layers for row in seen.cut.rows] == [
        row.layers for row in inspect(trained).cut.rows
    ]


def test_numbers_agree_with_their_nouns():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    inference = compile_inference(model, Options(**EAGER))
    inference(X[:1])
    run = torch.compile(model, backend="ipu", options=EAGER)
    run(X)
    prediction = ipu_dynamo.predict(inference)
    predicted = str(prediction), str(page_view(prediction)["facts"])
    for text in (*_all_texts(inference), *_all_texts(run), *predicted):
        assert re.findall(r"\b1 [\w-]*[^\Ws]s\b", text) == []


def _all_texts(x):
    seen = inspect(x)
    for entry in seen.programs:
        yield from (str(entry), repr(entry.host), entry.text, entry.program.short())
        yield from (entry.schedule.svg(), ipu_dynamo.draw_program(entry.program))
    yield from (str(seen), seen.details, repr(seen))


def test_the_text_is_short_and_the_details_have_the_rest(trained):
    """The text has a line for each stage, and nothing that a user reads only on a problem."""
    seen = inspect(trained)
    assert len(str(seen).splitlines()) == 1 + len(seen.cut.rows) + 4
    for what in ("keeps 5 micro-batches", "KeepValues", "passes of the step", "compiled in"):
        assert what in seen.details
        assert what not in str(seen)


def test_nothing_asks_for_machine_code_that_shows_no_memory(trained, monkeypatch):
    asked = []
    monkeypatch.setattr(program_entry, "why_not_followed", lambda _: asked.append(0) or "no")
    seen = inspect(trained)
    assert str(seen)
    assert seen.details
    assert seen._repr_html_()
    assert asked == []
    assert seen.program.host.memory is None
    assert seen.program.host.absent["memory"] == "no"
    assert asked == [0]
