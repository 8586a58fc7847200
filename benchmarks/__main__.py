"""Run the benchmarks, print a table, and write the figures as JSON.

Usage: python -m benchmarks [--json FILE] [--seconds S] [--runs N] [--rounds N] [--page PAGE]
                            [NAME ...]
       python -m benchmarks first_call ... (see there; it takes many minutes)
Every contender runs in a process of its own, without anything that was compiled before.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import peak_memory
from benchmarks.cases import CASES, FACTS, ON_REQUEST, measure
from benchmarks.child import in_fresh_child
from benchmarks.first_call import main as first_call
from benchmarks.goals import held
from benchmarks.jax_peer import is_installed
from benchmarks.measure import Wrong, medians
from benchmarks.page import refreshed
from benchmarks.provenance import provenance, write_json


def main(given: list[str]) -> None:
    """Measure the cases named on the command line, or all but those on request."""
    if given[:1] == ["first_call"]:
        return first_call(given[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = [*dict.fromkeys((*CASES, *FACTS, *peak_memory.CASES))]
    parser.add_argument("names", nargs="*", help=f"what to run, of: {', '.join(known)}")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    parser.add_argument("--page", type=Path, help="write the table into this page of the guide")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each timed case")
    parser.add_argument("--runs", type=int, default=1, help="of all timed cases; the last counts")
    parser.add_argument("--rounds", type=int, default=3, help="of each case of peak memory")
    arguments = parser.parse_args(given)
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if not is_installed():
        print("JAX is no contender, as it is not installed: pip install '.[bench]'")
    content: dict[str, Any] = {"benchmarks": {}, "facts": {}, "peak_memory": {}}
    machine = provenance()
    print(", ".join(f"{machine[what]}" for what in ("cpu", "vector")), f"{machine['cores']} cores")
    names = arguments.names or [name for name in known if name not in ON_REQUEST]
    for run in range(1, arguments.runs + 1):
        print(f"run {run} of {arguments.runs}")
        for name in names:
            if name in CASES:
                content["benchmarks"][name] = _timed(name, arguments.seconds)
    for line in held(content["benchmarks"], wide=machine["vector"] == "AVX512"):
        print(line)
    for name in names:
        if name in FACTS:
            content["facts"][name] = _fact(name)
        if name in peak_memory.CASES:
            content["peak_memory"][name] = _memory(name, arguments.rounds)
    if arguments.json:
        write_json(arguments.json, content)
    if arguments.page:
        text = arguments.page.read_text(encoding="utf-8")
        arguments.page.write_text(refreshed(text, provenance() | content), encoding="utf-8")


def _timed(name: str, seconds: float) -> dict[str, Any]:
    """The timings of a case, printed."""
    case = CASES[name]
    timings = measure(name, [*case.contenders()], threads=case.threads, seconds=seconds)
    print(f"{name}: {case.what}")
    print(
        "  median and fastest call; median and quartiles of times the last one's time; first call"
    )
    for who, timing in timings.items():
        if isinstance(timing, Wrong):
            print(f"  {who:<28} wrong: values differ by {timing.apart:.1e} of the largest")
            continue
        spent = f"{1e6 * timing.median:10.1f} us {1e6 * timing.fastest:10.1f} us"
        ratios = f"{timing.ratio:6.2f} ({timing.lower:.2f} to {timing.upper:.2f})"
        print(f"  {who:<28} {spent} {ratios} {timing.first:8.2f} s", flush=True)
    return {who: asdict(timing) for who, timing in timings.items()}


def _fact(name: str) -> dict[str, float]:
    """Figures that a process of their own has found, printed."""
    function = FACTS[name]
    facts: dict[str, float] = in_fresh_child(f"{function.__module__}:{function.__name__}")
    print(f"{name}:")
    for what, value in facts.items():
        print(f"  {what}: {value:.3f}", flush=True)
    return facts


def _memory(name: str, rounds: int) -> dict[str, Any]:
    """Peak memory and times of the steps of a case, printed."""
    case = peak_memory.CASES[name]
    runs = peak_memory.measure(case, rounds)
    print(f"{name}: {case.what}, medians of {rounds}")
    table = medians(runs)
    plain = next(iter(table.values()))
    for who, row in table.items():
        print(
            f"  {who:<16} extra memory {row['nbytes'] / 2**20:7.1f} MiB"
            f" ({row['nbytes'] / plain['nbytes']:4.2f})   step {1e3 * row['seconds']:7.1f} ms"
            f" ({row['seconds'] / plain['seconds']:4.2f})   loss {row['loss']:.6f}",
            flush=True,
        )
    return runs


if __name__ == "__main__":
    main(sys.argv[1:])
