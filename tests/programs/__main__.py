"""Fetch the programs, run each in a process of its own, and say which claims hold."""

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs import inert
from tests.programs.catalogue import PROGRAMS
from tests.programs.packages import NotInstalled, packages
from tests.programs.program import Program, Repository
from tests.programs.sources import NotFetched, Sources

_ROOT = Path(__file__).parents[2]
_SHOWN, _WIDTH = 12, 300  # last lines of a program that fails, and their length
_FILE_NAME = 200  # characters: command lines are longer than names of files may be
# torchvision's own kernels are for another build of PyTorch; its Python needs their names
_NO_KERNELS = """import torch

for name in ("nms", "qnms"):
    boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    torch.library.define(f"torchvision::{name}", boxes)
"""
_OLD_FILES = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # PyTorch's default when they were written
_STAND_IN = "from tests.programs.{}_stand_in import install\n\ninstall()\n"


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
    parser.add_argument("--logs", type=Path, help="a folder for all that the programs print")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each program")
    chosen = parser.parse_args(arguments)
    local = {name: Path(folder) for name, _, folder in (s.partition("=") for s in chosen.source)}
    programs = [p for name, p in PROGRAMS.items() if fnmatch.fnmatch(name, chosen.only)]
    repositories = {program.repository for program in programs}
    repositories |= {found for program in programs for found, _ in program.beside.values()}
    if unknown := local.keys() - {p.repository.name for p in PROGRAMS.values()}:
        parser.error(f"no program comes from {', '.join(sorted(unknown))}")
    sources = {r: Sources(r, local.get(r.name)) for r in repositories}
    failed = 0
    for program in programs:
        begun = time.perf_counter()
        try:
            problem = run(program, sources, chosen.timeout)
        except (NotFetched, NotInstalled) as error:
            print(error, file=sys.stderr)
            return 2
        seconds = time.perf_counter() - begun
        if chosen.logs is not None and problem:
            chosen.logs.mkdir(parents=True, exist_ok=True)
            name = program.name.replace("/", "_")[:_FILE_NAME]
            (chosen.logs / f"{name}.log").write_text(problem)
        print(
            f"{'FAILS' if problem else 'holds'}  {program.name}: {program.claim} ({seconds:.0f} s)"
        )
        if problem:
            failed += 1
            print("\n".join(f"    {line[:_WIDTH]}" for line in problem.splitlines()[-_SHOWN:]))
        sys.stdout.flush()
    print(f"{len(programs) - failed} of {len(programs)} programs run, and their claims hold")
    return 1 if failed else 0


def run(program: Program, all_sources: Mapping[Repository, Sources], timeout: float) -> str:
    """Run a program in a process and a folder of its own; what it prints if it fails, else ""."""
    sources = all_sources[program.repository]
    with tempfile.TemporaryDirectory(prefix="program_") as folder:
        source, work, stand_ins = (Path(folder, name) for name in ("source", "work", "stand_ins"))
        for part in (source, work, stand_ins):
            part.mkdir()
        file = (work if program.folder else source) / Path(program.path).relative_to(program.folder)
        if program.folder:
            sources.copy(program.folder, work)
        else:
            file = source / Path(program.path).name
            file.write_text(sources.read(program.path))
        for name, (repository, part_of_it) in program.beside.items():
            all_sources[repository].copy(part_of_it, stand_ins / name)
        inert.write(program.inert, stand_ins)  # files: workers that spawn import them, too
        if any(package.startswith("torchvision") for package in program.packages):
            (stand_ins / "sitecustomize.py").write_text(_NO_KERNELS)
        else:
            (stand_ins / "torchvision.py").write_text(_STAND_IN.format("torchvision"))
        (stand_ins / "torch_scatter.py").write_text(_STAND_IN.format("torch_scatter"))
        found = _ROOT, stand_ins, packages(program.packages), os.environ.get("PYTHONPATH")
        path = os.pathsep.join(str(part) for part in found if part)
        try:
            result = subprocess.run(
                [sys.executable, "-P", "-m", "tests.programs.child", program.name, str(file)],
                cwd=work,
                env={**os.environ, **_OLD_FILES, "PYTHONPATH": path},
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
