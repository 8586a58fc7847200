"""Fetch the programs, run each in a process of its own, and say which claims hold."""

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.programs import guide
from tests.programs.program import Program
from tests.programs.sources import NotFetched, Sources

_ROOT = Path(__file__).parents[2]
_SHOWN = 12  # last lines of a program that fails


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs that the arguments choose; 0 if all claims hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument(
        "--source",
        type=Path,
        help="a clone, bare repository or mirror of graphcore/poptorch, instead of fetching it",
    )
    parser.add_argument("--only", default="*", help="a shell pattern of paths, as '*/mnist.py'")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each program")
    chosen = parser.parse_args(arguments)
    programs = [
        program for name, program in guide.PROGRAMS.items() if fnmatch.fnmatch(name, chosen.only)
    ]
    sources = Sources(guide.URL, guide.COMMIT, chosen.source)
    failed = 0
    for program in programs:
        begun = time.perf_counter()
        try:
            problem = run(program, sources.read(program.path), chosen.timeout)
        except NotFetched as error:
            print(error, file=sys.stderr)
            return 2
        seconds = time.perf_counter() - begun
        print(
            f"{'FAILS' if problem else 'holds'}  {program.name}: {program.claim} ({seconds:.0f} s)"
        )
        if problem:
            failed += 1
            print("\n".join(f"    {line}" for line in problem.splitlines()[-_SHOWN:]))
        sys.stdout.flush()
    print(f"{len(programs) - failed} of {len(programs)} programs run, and their claims hold")
    return 1 if failed else 0


def run(program: Program, text: str, timeout: float) -> str:
    """Run a program in a process and a folder of its own; what it prints if it fails, else ""."""
    with tempfile.TemporaryDirectory(prefix="program_") as folder:
        file = Path(folder, "source", Path(program.path).name)
        work = Path(folder, "work")
        file.parent.mkdir()
        work.mkdir()
        file.write_text(text)
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
        try:
            result = subprocess.run(
                [sys.executable, "-m", "tests.programs.child", program.name, str(file)],
                cwd=work,
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it did not end in {timeout:.0f} s"
        return (result.stdout or "it said nothing") if result.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
