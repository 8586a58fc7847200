"""Run every contender of a case in a process of its own, which is told when to work.

In this file's process: `python -m benchmarks.processes CASE CONTENDER` makes the contender, and for
every number that it reads makes so many calls and prints the seconds of one; a contender whose
values are wrong says so and ends.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from benchmarks.measure import (
    Checked,
    Clock,
    Timing,
    Wrong,
    WrongValuesError,
    clock,
    side_by_side,
)
from benchmarks.provenance import ROOT


def measure(
    case: str, names: list[str], *, threads: int, seconds: float
) -> dict[str, Timing | Wrong]:
    """Time the contenders `names` of a case, each with so many intra-op threads.

    Nothing that was compiled before is used: the first call is the time to a first step.
    """
    with ExitStack() as stack:
        clocks = {name: stack.enter_context(_process(case, name, threads)) for name in names}
        return side_by_side(clocks, seconds=seconds)


@contextmanager
def fresh_environment(*, threads: int) -> Iterator[dict[str, str]]:
    """An environment in which nothing is compiled yet."""
    with tempfile.TemporaryDirectory() as folder:
        yield os.environ | {
            "IPU_DYNAMO_CACHE_DIR": os.path.join(folder, "stages"),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(ROOT),
        }


@contextmanager
def _process(case: str, name: str, threads: int) -> Iterator[Clock]:
    with fresh_environment(threads=threads) as environment:
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
                    if kind == "wrong":
                        raise WrongValuesError(float(value))
                raise RuntimeError(f"{case}, {name}: the process has ended; its error is above")

            yield seconds
            asked.close()


def main() -> None:
    """Be a contender."""
    from benchmarks.cases import CASES

    case, name = sys.argv[1:]
    torch.manual_seed(0)
    step = CASES[case].contenders()[name]()
    timed = clock(step)
    for number, line in enumerate(sys.stdin):
        spent = timed(int(line))
        if number == 0 and isinstance(step, Checked):
            try:
                step.check()
            except WrongValuesError as error:
                print("wrong", error.apart, flush=True)
                return
        print("seconds", spent, flush=True)


if __name__ == "__main__":
    main()
