"""Start a process that runs configurations in one checkout, and talk to it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

_HERE = Path(__file__).resolve().parent


class Checkout:
    """A process in which one checkout's packages run this folder's models.

    It has the interpreter of the checkout's own `.venv` where there is one, else this one's, and
    one intra-op thread. The models and what measures them are those of this folder in both.

    Args:
        root: the checkout.
        name: what tells its folder and its log from those of others.
        folder: where its log lies; exists.
        cache: where compiled code is kept; may be shared between processes of the same checkout.
        without: names of passes that it leaves out.
    """

    def __init__(
        self, root: Path, name: str, folder: Path, cache: Path, without: Sequence[str] = ()
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        code = folder / "code"
        if not code.exists():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(_HERE, code / _HERE.name, ignore=ignored)
        own = root / ".venv" / "bin" / "python"
        python = str(own) if own.exists() else sys.executable
        environment = os.environ | {
            "IPU_DYNAMO_CACHE_DIR": str(cache / "stages"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(code), str(root))),
        }
        if without:
            environment["IPU_DYNAMO_WITHOUT"] = ",".join(without)
        # What measured times decide may differ from run to run; a library that is named may not.
        environment.setdefault("IPU_DYNAMO_MATMUL", "torch")
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"{_HERE.name}.child", str(root)],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(self, what: str) -> None:
        """Send a line; `answer` waits for what comes back."""
        assert self._process.stdin is not None
        try:
            print(what, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> dict[str, Any]:
        """The answer to the last line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> RuntimeError:
        log = self._log.read_text(encoding="utf-8", errors="replace")
        return RuntimeError(f"the process of {self.name} has ended:\n{log[-3000:]}")

    def __enter__(self) -> "Checkout":
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
            self._process.kill()
        self._process.wait()
