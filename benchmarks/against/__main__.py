"""Hold this checkout against another one, on small models.

It compares the graphs that reach an engine, the bits after training, and the peak memory and the
time of a call. The other checkout runs twice, which shows how much times vary.

Usage: python -m benchmarks.against OLD_CHECKOUT [--quick] [--only PATTERN] [--new CHECKOUT]
                                    [--json FILE] [--graphs FOLDER] [--without [PASS ...]]

Exits with 1 where graphs or bits differ and `expected.py` does not say why, where a configuration
raises, or where two runs of the old checkout differ. Memory and time are reported only.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.against.comparison import HEAD, Comparison, summary
from benchmarks.against.configurations import CONFIGURATIONS, Configuration
from benchmarks.child import ROOT, Child
from benchmarks.measure import side_by_side
from benchmarks.provenance import state_of_checkout, write_json


def main() -> None:
    """Compare, print the table, write the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, help="the checkout to compare with")
    parser.add_argument("--new", type=Path, default=ROOT, help="instead of this checkout")
    parser.add_argument("--quick", action="store_true", help="a quarter of them, none by Inductor")
    parser.add_argument("--only", default="*", help="names that match this shell pattern")
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "build" / "against.json",
        help="write what was found into this file",
    )
    parser.add_argument("--graphs", type=Path, help="write graphs that differ into this folder")
    parser.add_argument(
        "--without",
        nargs="*",
        default=(),
        metavar="PASS",
        help="passes that the new checkout leaves out, as the old one has none such",
    )
    arguments = parser.parse_args()
    chosen = [
        c
        for c in CONFIGURATIONS.values()
        if c.quick >= arguments.quick and fnmatchcase(c.name, arguments.only)
    ]
    if not chosen:
        parser.error(f"no configuration matches {arguments.only}")
    old, new = arguments.old.resolve(), arguments.new.resolve()
    comparisons = _compare_all(chosen, old, new, arguments.without)
    for text in filter(None, (c.details() for c in comparisons)):
        print(f"\n{text}")
    print(f"\n{summary(comparisons)}")
    _write_json(arguments.json, comparisons, old, new)
    if arguments.graphs:
        _write_graphs(arguments.graphs, comparisons)
    sys.exit(any(c.fails for c in comparisons))


def _compare_all(
    chosen: list[Configuration], old: Path, new: Path, without: Sequence[str]
) -> list[Comparison]:
    comparisons = []
    texts: dict[str, str] = {}
    # Choices by measured times may differ from run to run; a library that is named may not.
    steady = {
        "OMP_NUM_THREADS": "1",
        "IPU_DYNAMO_MATMUL": os.environ.get("IPU_DYNAMO_MATMUL", "torch"),
    }
    left_out = {"IPU_DYNAMO_WITHOUT": ",".join(without)} if without else {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        processes = {}
        for who, root, more in (("old", old, {}), ("new", new, left_out), ("again", old, {})):
            folder = Path(temporary, "new" if who == "new" else "old")
            processes[who] = stack.enter_context(Child(folder, root, **steady, **more))
            processes[who].call("benchmarks.against.runner:Runner", str(root))
        print(HEAD)
        for configuration in chosen:
            comparison = _compare(configuration, processes, texts)
            comparisons.append(comparison)
            print(comparison.row(), flush=True)
    return comparisons


def _compare(
    configuration: Configuration, processes: dict[str, Child], texts: dict[str, str]
) -> Comparison:
    """Old and new compile side by side, the old one again after them; calls are timed in turn."""
    answers: dict[str, dict[str, Any]] = {}
    for together in (("old", "new"), ("again",)):
        for who in together:
            processes[who].ask(".run", configuration.name)
        for who in together:
            answers[who] = processes[who].answer()
            texts |= answers[who].pop("texts", {})
    timings: Any = {}
    if not any("error" in answer for answer in answers.values()):
        clocks = {who: partial(processes[who].call, ".seconds") for who in ("new", "again", "old")}
        timings = side_by_side(clocks, seconds=0.0)
    return Comparison(configuration, **answers, timings=timings, texts=texts)


def _write_json(path: Path, comparisons: list[Comparison], old: Path, new: Path) -> None:
    content = {
        **state_of_checkout(new),
        "old": state_of_checkout(old),
        "configurations": {
            c.name: {
                "fails": c.fails,
                "differences": c.differences,
                "expected": c.reasons,
                "timings": {who: asdict(timing) for who, timing in c.timings.items()},
                "answers": {"old": c.old, "again": c.again, "new": c.new},
            }
            for c in comparisons
        },
    }
    write_json(path, content)


def _write_graphs(folder: Path, comparisons: list[Comparison]) -> None:
    """The texts of graphs that are in one checkout only, to be compared by other tools."""
    for comparison in comparisons:
        if "graphs" not in comparison.differences:
            continue
        for side, answer, other in (
            ("old", comparison.old, comparison.new),
            ("new", comparison.new, comparison.old),
        ):
            here = folder / comparison.name.replace("/", ".") / side
            here.mkdir(parents=True, exist_ok=True)
            for key in answer["graphs"].keys() - other["graphs"].keys():
                (here / f"{key}.txt").write_text(comparison.texts[key], encoding="utf-8")


if __name__ == "__main__":
    main()
