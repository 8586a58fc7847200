"""Run the benchmarks, print a table, and write the figures as JSON.

Usage: python -m benchmarks [--json FILE] [--seconds S] [--page PAGE] [NAME ...]
       python -m benchmarks first_call ... (see there; it takes many minutes)
Every contender runs in a process of its own, without anything that was compiled before.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, FACTS, ON_REQUEST, measure
from benchmarks.child import fresh_child
from benchmarks.first_call import main as first_call
from benchmarks.jax_peer import is_installed
from benchmarks.measure import Wrong
from benchmarks.page import refreshed
from benchmarks.provenance import provenance, write_json


def main() -> None:
    """Measure the cases named on the command line, or all."""
    if sys.argv[1:2] == ["first_call"]:
        return first_call(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = [*dict.fromkeys((*CASES, *FACTS))]
    parser.add_argument("names", nargs="*", help=f"what to run, of: {', '.join(known)}")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    parser.add_argument("--page", type=Path, help="write the table into this page of the guide")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each case")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if not is_installed():
        print("JAX is no contender, as it is not installed: pip install 'ipu_dynamo[bench]'")
    content: dict[str, Any] = {"benchmarks": {}, "facts": {}}
    for name in arguments.names or [name for name in known if name not in ON_REQUEST]:
        if name in CASES:
            content["benchmarks"][name] = _timed(name, arguments.seconds)
        if name in FACTS:
            content["facts"][name] = _fact(name)
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
    print("  median and fastest call; times the time of the last contender; first call")
    for who, timing in timings.items():
        if isinstance(timing, Wrong):
            print(f"  {who:<28} wrong: values differ by {timing.apart:.1e} of the largest")
            continue
        spent = f"{1e6 * timing.median:10.1f} us {1e6 * timing.fastest:10.1f} us"
        print(f"  {who:<28} {spent} {timing.ratio:6.2f} {timing.first:8.2f} s", flush=True)
    return {who: asdict(timing) for who, timing in timings.items()}


def _fact(name: str) -> dict[str, float]:
    """Figures that a process of their own has found, printed."""
    function = FACTS[name]
    with fresh_child() as child:
        facts: dict[str, float] = child.call(f"{function.__module__}:{function.__name__}")
    print(f"{name}:")
    for what, value in facts.items():
        print(f"  {what}: {value:.3f}", flush=True)
    return facts


if __name__ == "__main__":
    main()
