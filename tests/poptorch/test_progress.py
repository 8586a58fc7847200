"""Check that the bar of a compilation says what is done, and leaves nothing behind."""

import logging
import re
import threading

import pytest
import torch
from torch import nn
from tqdm import tqdm

import poptorch
from ipu_dynamo import Options, compile_inference
from ipu_dynamo.progress import begin, code_comes_from, compilation
from poptorch.progress import compilation_bar


def test_a_bar_starts_no_thread(monkeypatch, capsys):
    monkeypatch.setattr(tqdm, "monitor", None)
    before = set(threading.enumerate())
    with compilation_bar(show=True):
        assert set(threading.enumerate()) == before
    assert "100%" in capsys.readouterr().err


def compiled(capsys, monkeypatch, *, show=True):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    model = nn.Sequential(nn.Linear(2, 3), poptorch.BeginBlock(nn.Linear(3, 2), "second", 1))
    options = poptorch.Options().deviceIterations(2).showCompilationProgressBar(show)
    executor = poptorch.inferenceModel(model, options)
    executor.compile(torch.ones(2, 2))
    return capsys.readouterr().err


def test_a_bar_says_what_is_done_and_how_long_it_took(capsys, monkeypatch):
    shown = compiled(capsys, monkeypatch)
    states = re.split(r"\r", shown)
    for what in ("tracing", r"pass 1 of \d+", "function 1 of 2"):
        assert any(re.search(what, state) for state in states), what
    last = states[-1]
    assert "Graph compilation: 100%" in last
    assert re.search(r"\d\.\d s: tracing \d\.\d s, \d+ passes \d\.\d s, 2 functions \d\.\d s", last)
    done = [int(number) for number in re.findall(r"(\d+)%", shown)]
    assert done == sorted(done)


def test_no_bar_where_none_is_wanted(capsys, monkeypatch):
    assert "Graph compilation" not in compiled(capsys, monkeypatch, show=False)


def test_a_compilation_that_fails_ends_below_a_hundred_per_cent(capsys):
    def fail():
        with compilation_bar(show=True), compilation("Net"):
            begin("passes", 3, 4)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    shown = capsys.readouterr().err
    assert "pass 3 of 4" in shown
    assert "100%" not in shown


def test_the_log_has_a_line_for_each_compilation(caplog):
    with caplog.at_level(logging.INFO, "ipu_dynamo.progress"):
        compile_inference(nn.Linear(2, 2), Options(engine="eager")).compile(torch.ones(1, 2))
    (line,) = caplog.messages
    assert re.fullmatch(r"compiled Linear in \d.* s: tracing .* passes .*, 1 function .* s", line)


def test_times_say_where_the_code_of_functions_is_from():
    with compilation("Net") as times:
        begin("functions", 1, 3)
        for origin in ("disk", "compiler", "disk"):
            code_comes_from(origin)
        begin("compiler")
    found = re.sub(r"\d+\.\d s", "0.1 s", times())
    assert found == "0.1 s: 3 functions 0.1 s (2 from disk, 1 from the compiler), compiler 0.1 s"


def test_an_explanation_has_the_times():
    step = compile_inference(nn.Linear(2, 2), Options(engine="eager"))
    step.compile(torch.ones(1, 2))
    assert re.search(r"\ncompiled in \d+\.\d s: tracing .*, 1 function ", str(step.explain()))
