"""Compare two files that `make bench` or `make test-all` wrote.

Usage: python -m benchmarks.compare OLD.json NEW.json
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTICEABLE = 1.25  # a test this many times as slow, or as fast, is worth a line
TOO_SHORT = 0.5  # seconds; below this, the time of a test is noise


def main(old_file: Path, new_file: Path) -> None:
    """Print what differs between the two files, after the machines and commits they come from."""
    old, new = (json.loads(file.read_text(encoding="utf-8")) for file in (old_file, new_file))
    for key in ("commit", "modified", "date", "python", "torch", "cpu", "cores", "threads", "cuda"):
        same = old[key] == new[key]
        print(f"{key}: {old[key]}" if same else f"{key}: {old[key]} -> {new[key]}")
    lines = [*_tests(old.get("tests", {}), new.get("tests", {}))]
    lines += _benchmarks(old.get("benchmarks", {}), new.get("benchmarks", {}))
    print("\n".join(lines) or "no difference")


def _tests(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Lines on tests that came, went, changed their outcome or their speed."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before is None or after is None:
            yield f"{name}: {'gone' if after is None else 'new, ' + after['outcome']}"
        elif before["outcome"] != after["outcome"]:
            yield f"{name}: {before['outcome']} -> {after['outcome']}"
        elif max(before["seconds"], after["seconds"]) > TOO_SHORT:
            ratio = after["seconds"] / max(before["seconds"], 1e-9)
            if not 1 / NOTICEABLE < ratio < NOTICEABLE:
                yield f"{name}: {before['seconds']:.2f} s -> {after['seconds']:.2f} s"


def _benchmarks(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """One line for each contender of each benchmark: both medians and their ratio."""
    for case in sorted(old.keys() | new.keys()):
        before, after = old.get(case, {}), new.get(case, {})
        for name in sorted(before.keys() | after.keys()):
            if name not in before or name not in after:
                yield f"{case}, {name}: {'gone' if name in before else 'new'}"
                continue
            if "apart" in before[name] or "apart" in after[name]:
                states = ["wrong" if "apart" in side[name] else "timed" for side in (before, after)]
                yield f"{case}, {name}: {states[0]} -> {states[1]}"
                continue
            ratio = after[name]["median"] / before[name]["median"]
            us = [1e6 * timing["median"] for timing in (before[name], after[name])]
            yield f"{case}, {name}: {us[0]:.1f} us -> {us[1]:.1f} us, {ratio:.2f} times the time"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
