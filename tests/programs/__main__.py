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

from tests.programs.catalogue import PROGRAMS
from tests.programs.program import Program
from tests.programs.sources import NotFetched, Sources

_ROOT = Path(__file__).parents[2]
_SHOWN = 12  # last lines of a program that fails
_TORCHVISION = "from tests.programs.torchvision_stand_in import install\n\ninstall()\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs that the arguments choose; 0 if all claims hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a clone, bare repository or mirror, instead of fetching it: poptorch=FOLDER",
    )
    parser.add_argument("--only", default="*", help="a shell pattern of paths, as '*/mnist.py'")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each program")
    chosen = parser.parse_args(arguments)
    local = {name: Path(folder) for name, _, folder in (s.partition("=") for s in chosen.source)}
    programs = [p for name, p in PROGRAMS.items() if fnmatch.fnmatch(name, chosen.only)]
    repositories = {program.repository for program in programs}
    if unknown := local.keys() - {p.repository.name for p in PROGRAMS.values()}:
        parser.error(f"no program comes from {', '.join(sorted(unknown))}")
    sources = {r: Sources(r, local.get(r.name)) for r in repositories}
    failed = 0
    for program in programs:
        begun = time.perf_counter()
        try:
            text = sources[program.repository].read(program.path)
            problem = run(program, text, chosen.timeout)
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
        source, work = Path(folder, "source"), Path(folder, "work")
        source.mkdir()
        work.mkdir()
        (source / "torchvision.py").write_text(_TORCHVISION)  # workers that spawn import it, too
        file = source / Path(program.path).name
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
