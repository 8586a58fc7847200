"""Check the tools that measure and compare, not what they measure."""

import json
import time
from dataclasses import asdict

import pytest
import torch
from torch import nn

import benchmarks.__main__
import ipu_dynamo
from benchmarks.cases import CASES, FACTS, measure
from benchmarks.compare import main as compare
from benchmarks.goals import held
from benchmarks.jax_peer import JAX
from benchmarks.measure import Timing, Wrong, WrongValuesError, clock, medians, side_by_side
from benchmarks.page import refreshed
from benchmarks.provenance import provenance


def test_side_by_side_tells_fast_from_slow_and_counts_calls():
    calls = {"fast": 0, "slow": 0}

    def sleep(name, seconds):
        calls[name] += 1
        time.sleep(seconds)

    contenders = {
        "slow": clock(lambda: sleep("slow", 0.02)),
        "fast": clock(lambda: sleep("fast", 0.001)),
    }
    timings = side_by_side(contenders, seconds=0.2)
    assert timings["slow"].fastest >= 0.02
    assert 0.001 <= timings["fast"].median < timings["slow"].median
    assert timings["fast"].ratio == 1 < timings["slow"].ratio
    for name, timing in timings.items():
        assert timing.calls == calls[name] - 4  # the first one, and three that size the bursts
        assert timing.calls >= 5


def test_wrong_values_stand_in_the_place_of_times(capsys):
    def wrong(calls):
        raise WrongValuesError(0.5)

    timings = side_by_side({"wrong": wrong, "ours": clock(lambda: None)}, seconds=0.0)
    assert list(timings) == ["wrong", "ours"]
    assert timings["wrong"] == Wrong(0.5)
    assert timings["ours"].ratio == 1
    case = {name: asdict(timing) for name, timing in timings.items()}
    page = "<!-- benchmarks -->\n<!-- end of benchmarks -->\n"
    shown = refreshed(page, {**provenance(), "benchmarks": {"mlp": case}, "facts": {}})
    assert f"| {CASES['mlp'].what} | wrong | wrong | by 5.0e-01 | |" in shown


def test_compare_says_what_changed(tmp_path, capsys):
    tests = {name: {"outcome": "passed", "seconds": 1.0} for name in ("broken", "same", "slower")}
    old = provenance() | {"tests": tests, "benchmarks": {"mlp": {"eager": {"median": 1e-4}}}}
    new = json.loads(json.dumps(old)) | {"commit": "other"}
    new["tests"]["broken"]["outcome"] = "failed"
    new["tests"]["slower"]["seconds"] = 2.0
    new["tests"]["added"] = {"outcome": "skipped", "seconds": 0.0}
    new["benchmarks"]["mlp"]["eager"]["median"] = 2e-4
    for name, content in (("old.json", old), ("new.json", new)):
        (tmp_path / name).write_text(json.dumps(content))
    compare(tmp_path / "old.json", tmp_path / "new.json")
    printed = capsys.readouterr().out.splitlines()
    assert f"commit: {old['commit']} -> other" in printed
    assert f"torch: {old['torch']}" in printed
    assert printed[-4:] == [
        "added: new, skipped",
        "broken: passed -> failed",
        "slower: 1.00 s -> 2.00 s",
        "mlp, eager: 100.0 us -> 200.0 us, 2.00 times the time",
    ]


def test_medians_are_those_of_each_figure_over_the_runs():
    first, second, third = (
        {"seconds": s, "nbytes": n} for s, n in ((1.0, 5.0), (3.0, 1.0), (2.0, 9.0))
    )
    found = medians({"ours": [first, second, third], "not run yet": []})
    assert found == {"ours": {"seconds": 2.0, "nbytes": 5.0}}


@pytest.mark.slow
def test_contenders_are_made_where_they_run(monkeypatch):
    def made(*_, **__):
        raise AssertionError("a contender is made before it is asked for")

    for package, name in (
        (torch, "compile"),
        (ipu_dynamo, "compile_training"),
        (ipu_dynamo, "compile_inference"),
        (nn.Module, "__call__"),
    ):
        monkeypatch.setattr(package, name, made)
    assert all(len(case.contenders()) > 1 for case in CASES.values())
    timings = measure("small_images", ["eager"], threads=1, seconds=0.1)
    assert timings["eager"].calls >= 5


@pytest.mark.slow
def test_the_overhead_of_a_device_iteration_is_found():
    whole, beside = FACTS["overhead"]().values()
    assert 0 < beside < whole


def test_a_goal_holds_up_to_its_limit_and_for_its_own_processors():
    def timings(ratio, upper):
        return {"ratio": ratio, "lower": ratio, "upper": upper}

    ours = timings(1.0, 1.0)
    run = {
        "mlp_784": {
            "eager": timings(0.5, 1 / 1.04),
            JAX: timings(1 / 0.94, 2.0),
            "compile_training": ours,
        },
        "cuts": {"eager, one core": timings(0.5, 0.5), "balanced": ours},
        "encoder": {"eager": timings(0.5, 1 / 1.06), "ours": ours},
        "pipeline_adamw": {"torch pipelining": {"apart": 0.5}, "2 workers": ours},
    }
    jax = "mlp_784: 0.94 of the time of JAX (median), at most"
    eager = "of the time of eager (lower quartile), at most 1.05"
    rest = [f"mlp_784: 1.04 {eager}: holds", f"encoder: 1.06 {eager}: DOES NOT HOLD"]
    assert list(held(run, wide=False)) == [f"{jax} 0.95: holds", *rest]
    assert list(held(run, wide=True)) == [f"{jax} 0.92: DOES NOT HOLD", *rest]


def test_the_last_run_of_several_counts(tmp_path, capsys, monkeypatch):
    ratios = iter((2.0, 3.0))

    def timed(name, names, **_):
        ratio = next(ratios)
        return {n: Timing(1.0, 1.0, 1.0, 5, ratio, ratio, ratio) for n in names}

    monkeypatch.setattr(benchmarks.__main__, "measure", timed)
    benchmarks.__main__.main(["mlp", "--runs", "2", "--json", str(tmp_path / "bench.json")])
    kept = json.loads((tmp_path / "bench.json").read_text())["benchmarks"]["mlp"]
    assert kept["eager"]["ratio"] == 3.0
    assert "mlp: 0.33 of the time of eager" in capsys.readouterr().out


def test_the_page_shows_the_figures_of_a_run():
    timing = {"first": 2.0, "median": 1.5e-4, "fastest": 1e-4, "calls": 9, "ratio": 3.25}
    content = {
        **provenance(),
        "benchmarks": {"mlp": {"eager": timing, "compile_training": timing | {"ratio": 1.0}}},
        "facts": {next(iter(FACTS)): {"what it is": 1.5}},
    }
    page = "before\n<!-- benchmarks -->\nold\n<!-- end of benchmarks -->\nafter\n"
    shown = refreshed(page, content)
    assert "old" not in shown
    assert f"| {CASES['mlp'].what} | eager | 150 us | 3.25 | 2.0 s |" in shown
    assert "|  | compile_training | 150 us | 1.00 | 2.0 s |" in shown
    assert "- what it is: 1.50" in shown
    assert content["cpu"] in shown
    assert refreshed(shown, content) == shown
