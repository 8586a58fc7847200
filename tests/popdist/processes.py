"""Start programs as several processes, and check that none of them stays."""

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
_MARK = "TEST_OF_PROCESSES"  # in the environment of every process that a test started
_LIMIT = 120  # seconds


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; afterwards no process that it started may be alive."""
    (result,) = run_together([command], [variables])
    return result


def run_together(
    commands: Sequence[Sequence[str]], variables: Sequence[dict[str, str]]
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands at once, each with variables of its own."""
    mark = str(uuid.uuid4())
    started = [
        subprocess.Popen(
            command,
            env=_environment(own) | {_MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, own in zip(commands, variables, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=_LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
        assert _alive(f"{_MARK}={mark}") == []
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(started, outputs, strict=True)
    ]


def poprun(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `poprun` with these words."""
    return run(sys.executable, "-m", "popdist._launch", *words, **variables)


def free_port() -> str:
    """A free port of this computer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def _environment(variables: dict[str, str]) -> dict[str, str]:
    """This environment without the variables of launchers, with these added.

    Unbuffered, `print` would write a line and its end one after the other, and processes that
    write to one pipe would mix them.
    """
    unset = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "POPDIST_", "IPU_DYNAMO_MESH")
    unset = (*unset, "PYTHONUNBUFFERED")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    return plain | {"PYTHONPATH": str(ROOT), "IPU_DYNAMO_ENGINE": "eager"} | variables


def _alive(mark: str) -> list[str]:
    """The command lines of processes with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_text(errors="replace").split("\0"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended, or it is not ours
    return found
