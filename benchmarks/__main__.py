"""Run the benchmarks, print a table, and write the figures as JSON.

Usage: python -m benchmarks [--json FILE] [--seconds S] [NAME ...]
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import door_overhead, half, pipeline, training_step
from benchmarks.measure import side_by_side
from benchmarks.provenance import provenance

CASES = {
    **training_step.CASES,
    **pipeline.CASES,
    **door_overhead.CASES,
    **half.CASES,  # last: they leave PyTorch with one thread
}  # name of a case -> function that makes its contenders
FACTS = pipeline.FACTS  # name of a case -> function that measures what else is to be known


def main() -> None:
    """Measure the cases named on the command line, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"cases to run, of: {', '.join(CASES)}")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each case")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    content = {**provenance(), "benchmarks": {}, "facts": {}}
    for name in arguments.names or CASES:
        torch.manual_seed(0)
        timings = side_by_side(CASES[name](), seconds=arguments.seconds)
        content["benchmarks"][name] = {who: asdict(timing) for who, timing in timings.items()}
        print(f"{name}: median and fastest call, each beside the first contender's; first call")
        first = next(iter(timings.values()))
        for who, timing in timings.items():
            median = f"{1e6 * timing.median:10.1f} us {timing.median / first.median:5.2f}"
            fastest = f"{1e6 * timing.fastest:10.1f} us {timing.fastest / first.fastest:5.2f}"
            print(f"  {who:<24} {median} {fastest} {timing.first:8.2f} s")
        if name in FACTS:
            facts = content["facts"][name] = FACTS[name]()
            for what, value in facts.items():
                print(f"  {what}: {value:.3f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
