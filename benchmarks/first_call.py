"""Time the first step of fresh processes with empty caches: this checkout, an older one, peers.

Usage: python -m benchmarks first_call [--before CHECKOUT] [--only CASE ...] [--rounds N]
                                       [--json FILE]

Figures are wall and CPU seconds, without `import torch` and with all compilers, and the peak memory
of the process and its compilers together. Contenders take turns; shown are medians. `--before` is a
checkout with an environment of its own in `.venv`. This file also runs there, so it uses only the
public names of `ipu_dynamo`.
"""

import argparse
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

from benchmarks import models
from benchmarks.child import ROOT, Child
from benchmarks.jax_peer import is_installed, trained
from benchmarks.measure import Figures, Step, cpu_seconds, medians
from benchmarks.provenance import state_of_checkout, write_json
from benchmarks.work import (
    Training,
    adamw,
    classifying,
    encoder,
    head_in_parts,
    language_model,
    loop,
    mlp_784,
    recurrent,
    small_images,
    texts,
    whole,
)

_PAGE = os.sysconf("SC_PAGE_SIZE")


def _digits() -> Training:
    stages = ("layers.0", "layers.2", "layers.6")
    return replace(small_images(8, 8), accumulation=8, stages=stages)


def _other() -> Training:
    model, stages = models.perceptron(48, 80, 56, 10), ("layers.0", "layers.2", "layers.4")
    return classifying(model, 8, 8, 48, optimizer=adamw, accumulation=8, stages=stages)


def _small_decoder() -> Training:
    model = models.tied_language_model(2, 256, 64, 32)
    return Training(model, adamw, texts(256, 4, 32), 4)


def _residual() -> Training:
    model = models.residual(*range(8, 72, 4))
    stages = tuple(f"layers.{first}" for first in range(0, 16, 2))
    return classifying(model, 4, 16, 1, 8, 8, optimizer=adamw, accumulation=16, stages=stages)


TRAININGS: dict[str, Callable[[], Training]] = {
    "digits": _digits,
    "other": _other,
    "residual": _residual,
    "mlp": partial(mlp_784, 32, 1),
    "language_model": language_model,
    "decoder": _small_decoder,
    "serialized_head": head_in_parts,
    **{f"encoder_{layers}": partial(encoder, layers) for layers in (6, 48)},
    **{
        f"{kind}_{steps}": partial(recurrent, kind, steps)
        for kind in ("LSTM", "GRU", "RNN")
        for steps in (10, 256, 1000)
    },
}


def _ours(work: Training, **options: Any) -> Step:
    return whole(work, engine="inductor", **options)


def _alone(work: Training) -> Step:
    """Ours, without further processes that lower functions."""
    torch._inductor.config.compile_threads = 1
    return _ours(work)


def _jax(work: Training) -> Step:
    """The work of a step as one function; the last number that it returns is the loss."""
    step = trained(work).step
    return lambda: step()[-1, -1]  # type: ignore[index]


STEPS: dict[str, Callable[[Training], Step]] = {
    "this": _ours,
    "before": _ours,
    "one process": _alone,
    "not outlined": partial(_ours, outline=False),
    "kept program": lambda work: _ours(work, program_cache=os.environ["XDG_CACHE_HOME"]),
    "torch.compile": partial(
        loop, compile_model=partial(torch.compile, backend="ipu", fullgraph=True)
    ),
    "inductor": partial(loop, compile_model=torch.compile, optimizer_too=True),
    "jax": _jax,
}  # how contenders make a step, by name


@dataclass(frozen=True)
class FirstCall:
    """A training whose first step is timed.

    Args:
        training: a name of `TRAININGS`.
        after: a training that a process before it has compiled, with the same caches; None: they
            are empty.
        contenders: those next to this checkout.
        environment: variables of all processes.
        on_request: whether it is run only if it is named.
    """

    training: str
    after: str | None = None
    contenders: tuple[str, ...] = ("inductor", "jax")
    environment: dict[str, str] = field(default_factory=dict)
    on_request: bool = False


_WAITED_FOR = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # so that compilers are counted
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # a step is part of the call, and threads would wait
_DOORS, _BY_INDUCTOR = ("torch.compile", "kept program"), {"IPU_DYNAMO_ENGINE": "inductor"}

CASES = {
    "digits": FirstCall("digits"),
    "second_program": FirstCall("other", after="digits"),
    "second_process": FirstCall("digits", after="digits", contenders=()),
    "mlp": FirstCall("mlp"),
    "language_model": FirstCall("language_model"),
    "encoder_6": FirstCall("encoder_6"),
    "encoder_48": FirstCall("encoder_48"),
    "residual": FirstCall("residual", None, ("one process",), on_request=True),
    "cold_start": FirstCall("decoder", None, _DOORS, _BY_INDUCTOR),
    "warm_start": FirstCall("decoder", "decoder", _DOORS, _BY_INDUCTOR),
    **{
        f"outlining_{n}": FirstCall(
            f"encoder_{n}", None, ("inductor", "not outlined"), _WAITED_FOR, on_request=True
        )
        for n in (6, 48)
    },
    **{
        name: FirstCall(name, None, (), _ONE_THREAD, on_request=True)
        for name in TRAININGS
        if name.startswith(("LSTM", "GRU", "RNN", "serialized"))
    },
}


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a line for each contender of each case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks first_call",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, help="an older checkout")
    usual = [name for name, case in CASES.items() if not case.on_request]
    parser.add_argument("--only", nargs="+", choices=CASES, default=usual, metavar="CASE")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--rounds", type=int, default=3, help="figures are medians over these")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    chosen = parser.parse_args(arguments)
    before = chosen.before.resolve() if chosen.before else None
    found = {}
    for name in chosen.only:
        roots = {"before": before} if before else {}
        roots |= dict.fromkeys((*CASES[name].contenders, "this"), ROOT)
        wanted = [who for who in chosen.contenders or roots if who != "jax" or is_installed()]
        contenders = {who: root for who, root in roots.items() if who in wanted}
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
    losses = {who: of["loss"] for who, of in figures.items()}
    if max(losses.values()) - min(losses.values()) > 1e-3 * abs(max(losses.values())):
        raise SystemExit(f"{name}: the losses of the first step differ: {losses}")
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


def _first_call(case: FirstCall, root: Path, who: str) -> Figures:
    """The figures of one process with caches of its own."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for training in filter(None, (case.after, case.training)):
            child = Child(Path(folder), root, **case.environment)
            with child, _watched(child.session) as seen:
                figures = child.call("benchmarks.first_call:first_step", training, who)
            figures["peak"] = float(max(seen))
    return figures


def first_step(training: str, who: str) -> Figures:
    """Wall and CPU seconds, those of compilers, and the loss, in this process."""
    torch.manual_seed(0)
    wall, cpu = time.perf_counter(), cpu_seconds()
    loss: Any = STEPS[who](TRAININGS[training]())()
    figures = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures["compilers"] = compilers.ru_utime + compilers.ru_stime
    return figures | {"loss": float(loss.sum())}


@contextmanager
def _watched(session: int) -> Iterator[list[int]]:
    """Bytes of a session's processes, resident together, looked at 20 times a second."""
    seen, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            seen.append(_resident_bytes(session))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


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
