"""Run code in new processes that have imported torch, and nothing of ours, when they begin.

To import torch is nearly all that such a process does, so one does it and forks the others.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

_SERVER = """
import json, os, sys
import torch
for line in sys.stdin:
    job = json.loads(line)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate((os.devnull, *job["outputs"])):
    file = os.open(name, os.O_RDWR | os.O_CREAT)
    os.dup2(file, number)
    os.close(file)
os.environ.clear()
os.environ.update(job["environment"])
os.chdir(job["folder"])
sys.path[:0] = job["path"]
exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


class Processes:
    """Runs code in one process after the other."""

    def __init__(self, server: subprocess.Popen[str], outputs: tuple[Path, Path]) -> None:
        self._server, self._outputs = server, outputs

    def run(self, code: str, folder: Path, path: list[str], environment: dict[str, str]) -> Done:
        """Run code in `folder`, where modules come from `path` first."""
        for file in self._outputs:
            file.unlink(missing_ok=True)
        job = {
            "code": code,
            "folder": str(folder),
            "path": path,
            "environment": environment,
            "outputs": [*map(str, self._outputs)],
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        returncode = int(self._server.stdout.readline())
        return Done(returncode, *(file.read_text() for file in self._outputs))


@contextmanager
def fresh_processes() -> Iterator[Processes]:
    """Processes for a block."""
    with (
        TemporaryDirectory() as name,
        subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=name,  # so that nothing of ours is found by accident
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        ) as server,
    ):
        yield Processes(server, (Path(name, "stdout"), Path(name, "stderr")))
