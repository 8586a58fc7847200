"""Run programs after reports, each in a process of its own, for `benchmarks.known_wrong`.

An outcome is `right`, `wrong`, `refused` (an IpuError), `fails` (another error), or `dies`.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

import ipu_dynamo
from tests.known_wrong import reported_programs  # noqa: F401
from tests.known_wrong.reports import PROGRAMS

KINDS = ("inductor", "ipu-eager", "ipu-inductor")
SECONDS = 300


def outcome(name: str, kind: str) -> tuple[str, str]:
    """Run a program in this process."""
    backend = "inductor" if kind == "inductor" else "ipu"
    torch.manual_seed(0)
    try:
        found = PROGRAMS[name].difference(lambda f: torch.compile(f, backend=backend))
    except ipu_dynamo.IpuError as error:
        return "refused", str(error).splitlines()[0]
    except Exception as error:
        if isinstance(error.__cause__, ipu_dynamo.IpuError):
            return "refused", str(error.__cause__).splitlines()[0]
        return "fails", f"{type(error).__name__}: {str(error)[:300]}"
    return ("wrong", found) if found else ("right", "")


def run(names: Iterable[str], kind: str) -> Iterator[tuple[str, str, str]]:
    """Run programs one after the other, each in a copy of this process."""
    for name in names:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _in_child(name, kind, writer)
        os.close(writer)
        with os.fdopen(reader) as said:
            line = said.read()
        _, status = os.waitpid(child, 0)
        if line:
            yield (name, *json.loads(line))
        else:
            yield name, "dies", f"exit status {status}"


def _in_child(name: str, kind: str, writer: int) -> Any:
    signal.alarm(SECONDS)
    sys.stdout = sys.stderr
    words = outcome(name, kind)
    os.write(writer, json.dumps(words).encode())
    os._exit(0)


def outcomes(kind: str, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Run programs, or all of them: of each the name, an outcome, and words.

    This process is a fresh one, of which each program gets a copy.

    Args:
        kind: `inductor` (PyTorch's own compiler), or an engine of ours: `ipu-eager`,
            `ipu-inductor`.
    """
    assert kind in KINDS, kind
    os.environ["IPU_DYNAMO_ENGINE"] = kind.removeprefix("ipu-")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    # What a first compilation imports is imported once, before the processes part.
    if kind != "ipu-eager":
        import_module("torch._inductor.compile_fx")
    if kind == "inductor":
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
    else:
        torch.compile(torch.cos, backend="ipu", options={"engine": "eager"})(torch.ones(2))
    gc.freeze()  # no process copies what all have
    return list(run(names or PROGRAMS, kind))
