"""Time the first step of fresh processes with empty caches: this checkout, an older one, peers.

Usage: python -m benchmarks first_call [--before CHECKOUT] [--only CASE ...] [--rounds N]
                                       [--json FILE]

Wall and CPU seconds, without `import torch` and with all compilers, and the peak of what the
process and its compilers hold together. Contenders take turns; shown are medians. `--before` is a
checkout with an environment of its own in `.venv`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first_call.peak import Peak
from benchmarks.jax_peer.peer import is_installed
from benchmarks.provenance import ROOT, provenance, state_of_checkout

_HERE = Path(__file__).resolve().parent
Figures = dict[str, float]


@dataclass(frozen=True)
class Case:
    """Args:
    training: whose first step is timed.
    after: what a process before it has compiled, with the same caches; None: they are empty.
    peers: whether Inductor and, where it is installed, JAX are timed, too.
    """

    training: str
    after: str | None = None
    peers: bool = True


CASES = {
    "digits": Case("digits"),
    "second_program": Case("other", after="digits"),
    "second_process": Case("digits", after="digits", peers=False),
    "mlp": Case("mlp"),
    "language_model": Case("language_model"),
    "encoder_6": Case("encoder_6"),
    "encoder_48": Case("encoder_48"),
}


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a line for each contender of each case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks first_call",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    chosen = parser.parse_args(arguments)
    before = chosen.before.resolve() if chosen.before else None
    content: dict[str, Any] = provenance() | {"first_call": {}}
    if before:
        content["before"] = state_of_checkout(before)
    for name in chosen.only:
        contenders = _contenders(CASES[name], before)
        if chosen.contenders:
            contenders = {who: c for who, c in contenders.items() if who in chosen.contenders}
        content["first_call"][name] = _measured(name, contenders, chosen.rounds)
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _contenders(case: Case, before: Path | None) -> dict[str, tuple[Path, str]]:
    """Checkout and kind of step of each contender; ours is the last."""
    contenders: dict[str, tuple[Path, str]] = {}
    if before:
        contenders["before"] = (before, "project")
    if case.peers:
        contenders["inductor"] = (ROOT, "inductor")
        if is_installed():
            contenders["jax"] = (ROOT, "jax")
    return contenders | {"this": (ROOT, "project")}


def _measured(name: str, contenders: dict[str, tuple[Path, str]], rounds: int) -> Any:
    runs: dict[str, list[Figures]] = {who: [] for who in contenders}
    for _ in range(rounds):
        for who, (root, kind) in contenders.items():
            runs[who].append(first_call(CASES[name], root, kind))
    medians = {
        who: {key: statistics.median(run[key] for run in of) for key in of[0]}
        for who, of in runs.items()
    }
    _check(name, {who: of["loss"] for who, of in medians.items()})
    ours = medians.get("this")
    print(f"{name}: medians of {rounds}")
    for who, of in medians.items():
        line = f"  {who:<9} wall {of['wall']:7.2f} s   CPU {of['cpu']:7.2f} s, of it compilers "
        line += f"{of['compilers']:6.2f} s   peak {of['peak'] / 2**20:6.0f} MiB"
        if ours and who != "this":
            line += f"   this / it: wall {ours['wall'] / of['wall']:.2f}"
            line += f", CPU {ours['cpu'] / of['cpu']:.2f}, peak {ours['peak'] / of['peak']:.2f}"
        print(line + f"   loss {of['loss']:.6f}", flush=True)
    return {who: {"medians": medians[who], "runs": runs[who]} for who in runs}


def _check(name: str, losses: dict[str, float]) -> None:
    """Refuse figures of contenders that did not compute the same."""
    if max(losses.values()) - min(losses.values()) > 1e-3 * abs(max(losses.values())):
        raise SystemExit(f"{name}: the losses of the first step differ: {losses}")


def first_call(case: Case, root: Path, kind: str) -> Figures:
    """The figures of one process with caches of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        code = folder / "code"
        shutil.copytree(_HERE, code / _HERE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tmp").mkdir()
        # PyTorch keeps some of what it compiles in the folder for temporary files
        environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"} | {
            "IPU_DYNAMO_CACHE_DIR": str(folder / "stages"),
            "XDG_CACHE_HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": os.pathsep.join((str(code), str(root))),
        }
        own = root / ".venv" / "bin" / "python"
        python = str(own) if own.exists() else sys.executable
        if case.after:
            _process(python, case.after, kind, folder, environment)
        return _process(python, case.training, kind, folder, environment)


def _process(
    python: str, training: str, kind: str, folder: Path, environment: dict[str, str]
) -> Figures:
    command = [python, "-m", f"{_HERE.name}.child", training, kind]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with Peak(process.pid) as peak:
        printed, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"{training} by {kind} in {environment['PYTHONPATH']}:\n{said[-3000:]}")
    figures: Figures = json.loads(printed.splitlines()[-1])
    return figures | {"peak": float(peak.nbytes)}


if __name__ == "__main__":
    main()
