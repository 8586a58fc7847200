"""Time the first step of fresh processes with empty caches: this checkout, an older one, peers.

Usage: python -m benchmarks first_call [--before CHECKOUT] [--only CASE ...] [--rounds N]
                                       [--json FILE]

Figures are wall and CPU seconds, without `import torch` and with all compilers, and the peak memory
of the process and its compilers together. Contenders take turns; shown are medians. `--before` is a
checkout with an environment of its own in `.venv`.
"""

import argparse
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, Child
from benchmarks.jax_peer import is_installed
from benchmarks.measure import Figures, medians
from benchmarks.provenance import state_of_checkout, write_json

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class FirstCall:
    """A training whose first step is timed.

    Args:
        training: a name of `TRAININGS` in `first_step.py`.
        after: a training that a process before it has compiled, with the same caches; None: they
            are empty.
        contenders: those next to this checkout.
        environment: variables of all processes.
    """

    training: str
    after: str | None = None
    contenders: tuple[str, ...] = ("inductor", "jax")
    environment: dict[str, str] = field(default_factory=dict)


def _outlining(layers: int) -> FirstCall:
    """Compilers are waited for, and counted."""
    contenders, environment = ("inductor", "not outlined"), {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return FirstCall(f"encoder_{layers}", None, contenders, environment)


CASES = {
    "digits": FirstCall("digits"),
    "second_program": FirstCall("other", after="digits"),
    "second_process": FirstCall("digits", after="digits", contenders=()),
    "mlp": FirstCall("mlp"),
    "language_model": FirstCall("language_model"),
    "encoder_6": FirstCall("encoder_6"),
    "encoder_48": FirstCall("encoder_48"),
    "outlining_6": _outlining(6),
    "outlining_48": _outlining(48),
}


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a line for each contender of each case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks first_call",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, help="an older checkout")
    every = [name for name, case in CASES.items() if "not outlined" not in case.contenders]
    parser.add_argument("--only", nargs="+", choices=CASES, default=every, metavar="CASE")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--rounds", type=int, default=3, help="figures are medians over these")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    chosen = parser.parse_args(arguments)
    before = chosen.before.resolve() if chosen.before else None
    found = {}
    for name in chosen.only:
        contenders = {who: ROOT for who in CASES[name].contenders if who != "jax" or is_installed()}
        contenders = ({"before": before} if before else {}) | contenders | {"this": ROOT}
        if chosen.contenders:
            contenders = {who: c for who, c in contenders.items() if who in chosen.contenders}
        found[name] = _measured(name, contenders, chosen.rounds)
    if chosen.json:
        old = {"before": state_of_checkout(before)} if before else {}
        write_json(chosen.json, {"first_call": found, **old})


def _measured(name: str, contenders: Mapping[str, Path], rounds: int) -> Any:
    runs: dict[str, list[Figures]] = {who: [] for who in contenders}
    for _ in range(rounds):
        for who, root in contenders.items():
            runs[who].append(_first_call(CASES[name], root, who))
    figures = medians(runs)
    _check(name, {who: of["loss"] for who, of in figures.items()})
    ours = figures.get("this")
    print(f"{name}: medians of {rounds}")
    for who, of in figures.items():
        line = f"  {who:<12} wall {of['wall']:7.2f} s   CPU {of['cpu']:7.2f} s, of it compilers "
        line += f"{of['compilers']:6.2f} s   peak {of['peak'] / 2**20:6.0f} MiB"
        if ours and who != "this":
            line += f"   this / it: wall {ours['wall'] / of['wall']:.2f}"
            line += f", CPU {ours['cpu'] / of['cpu']:.2f}, peak {ours['peak'] / of['peak']:.2f}"
        print(line + f"   loss {of['loss']:.6f}", flush=True)
    return {who: {"medians": figures[who], "runs": runs[who]} for who in runs}


def _check(name: str, losses: dict[str, float]) -> None:
    """Refuse figures of contenders that did not compute the same."""
    if max(losses.values()) - min(losses.values()) > 1e-3 * abs(max(losses.values())):
        raise SystemExit(f"{name}: the losses of the first step differ: {losses}")


def _first_call(case: FirstCall, root: Path, who: str) -> Figures:
    """The figures of one process with caches of its own."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for training in filter(None, (case.after, case.training)):
            with (
                Child(Path(folder), root, **case.environment) as child,
                Peak(child.session) as peak,
            ):
                figures = child.call("benchmarks.first_step:first_step", training, who)
            figures["peak"] = float(peak.nbytes)
    return figures


class Peak:
    """The largest sum of resident bytes of a session's processes, looked at 20 times a second."""

    def __init__(self, session: int) -> None:
        self.nbytes = 0
        self._session, self._over = session, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.nbytes = max(self.nbytes, _resident_bytes(self._session))


def _resident_bytes(session: int) -> int:
    """The memory of a session's processes now; shared pages count in each of them."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += int((folder / "statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            continue  # it has ended
    return total
