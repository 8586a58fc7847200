"""Run every contender of a case in a process of its own, which is told when to work.

In this file's process: `python -m benchmarks.processes CASE CONTENDER` makes the contender, and for
every number that it reads makes so many calls and prints the seconds of one.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from benchmarks.measure import Clock, Timing, clock, side_by_side
from benchmarks.provenance import ROOT


def measure(case: str, names: list[str], *, threads: int, seconds: float) -> dict[str, Timing]:
    """Time the contenders `names` of a case, each with so many intra-op threads.

    Nothing that was compiled before is used: the first call is the time to a first step.
    """
    with ExitStack() as stack:
        clocks = {name: stack.enter_context(_process(case, name, threads)) for name in names}
        return side_by_side(clocks, seconds=seconds)


@contextmanager
def _process(case: str, name: str, threads: int) -> Iterator[Clock]:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "IPU_DYNAMO_CACHE_DIR": os.path.join(folder, "stages"),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "benchmarks.processes", case, name]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            asked, answers = process.stdin, process.stdout
            assert asked is not None
            assert answers is not None

            def seconds(calls: int) -> float:
                print(calls, file=asked, flush=True)
                for line in answers:
                    kind, _, value = line.partition(" ")
                    if kind == "seconds":
                        return float(value)
                raise RuntimeError(f"{case}, {name}: the process has ended; its error is above")

            yield seconds
            asked.close()


def main() -> None:
    """Be a contender."""
    from benchmarks.cases import CASES

    case, name = sys.argv[1:]
    torch.manual_seed(0)
    timed = clock(CASES[case].contenders()[name]())
    for line in sys.stdin:
        print("seconds", timed(int(line)), flush=True)


if __name__ == "__main__":
    main()
