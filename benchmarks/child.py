"""Run functions in processes of their own, with the packages of any checkout: the one protocol.

A line on the standard input of `python -m benchmarks.child` is JSON: a function as `module:name`,
and its arguments. The answer is a line with its value, as JSON. Where the name is that of a class,
an object is made and held; later lines call methods of it, as `.method`. This file also runs in
other checkouts, and imports nothing of them: imports are a part of the measured time.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Child:
    """A process in which one checkout's packages run this checkout's benchmarks.

    It leads a session of its own. The interpreter is this one's, or for another checkout that of
    its `.venv`, where it has one.

    Args:
        folder: where it keeps compiled and temporary files; an empty folder means that nothing was
            compiled before. Processes of the same checkout may share one.
        root: the checkout.
        environment: more variables; those of this process are there, too.
    """

    def __init__(self, folder: Path, root: Path = ROOT, **environment: str) -> None:
        self._root = root
        code, temporary = folder / "code", folder / "tmp"
        for needed in (code, temporary):
            needed.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (code / "benchmarks").symlink_to(Path(__file__).resolve().parent)
        own = root / ".venv" / "bin" / "python"
        python = str(own) if root != ROOT and own.exists() else sys.executable
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.child"],
            cwd=code,  # comes before the checkout, which may have other benchmarks
            env=os.environ
            | {
                "IPU_DYNAMO_CACHE_DIR": str(folder / "stages"),
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
                "XDG_CACHE_HOME": str(folder / "home"),
                "TMPDIR": str(temporary),
                "PYTHONPATH": str(root),
            }
            | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self.session = self._process.pid

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function there, and return its value."""
        self.ask(function, *arguments)
        return self.answer()

    def ask(self, function: str, *arguments: Any) -> None:
        """Begin a call; `answer` waits for its value."""
        assert self._process.stdin is not None
        try:
            print(json.dumps([function, arguments]), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> Any:
        """The value of the last call.

        Raises:
            RuntimeError: the process has ended; with the last words of its log.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> RuntimeError:
        self._process.wait()
        self._log.seek(0)
        words = self._log.read()[-3000:]
        return RuntimeError(f"a process with the packages of {self._root} has ended:\n{words}")

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # it ends by itself, unless it is in the middle of a call
        if error is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.session, signal.SIGKILL)  # with its compilers
        self._process.wait()
        self._log.close()


@contextmanager
def fresh_child(**environment: str) -> Iterator[Child]:
    """A process of this checkout for which nothing was compiled before."""
    with tempfile.TemporaryDirectory() as folder, Child(Path(folder), **environment) as child:
        yield child


def in_fresh_child(function: str, *arguments: Any, **environment: str) -> Any:
    """Call a function in a process of its own for which nothing was compiled before."""
    with fresh_child(**environment) as child:
        return child.call(function, *arguments)


def serve() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    held: object = None
    for line in sys.stdin:
        name, arguments = json.loads(line)
        function = getattr(held, name[1:]) if name.startswith(".") else resolve_name(name)
        value = function(*arguments)
        if isinstance(function, type):
            held, value = value, None
        print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    serve()
