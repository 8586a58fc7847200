"""Check the tools that measure and compare, not what they measure."""

import json
import time

from benchmarks.compare import main as compare
from benchmarks.measure import side_by_side
from benchmarks.provenance import provenance


def test_side_by_side_tells_fast_from_slow_and_counts_calls():
    calls = {"fast": 0, "slow": 0}

    def sleep(name, seconds):
        calls[name] += 1
        time.sleep(seconds)

    contenders = {"fast": lambda: sleep("fast", 0.001), "slow": lambda: sleep("slow", 0.02)}
    timings = side_by_side(contenders, seconds=0.2)
    assert timings["slow"].fastest >= 0.02
    assert 0.001 <= timings["fast"].median < timings["slow"].median
    for name, timing in timings.items():
        assert timing.calls == calls[name] - 4  # the first one, and three that size the bursts
        assert timing.calls >= 5


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
