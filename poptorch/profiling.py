"""Record how long parts of a program take on the host, as a trace that browsers show.

`IPU_DYNAMO_TRACE` names the file; `PVTI_OPTIONS` with {"enable": "true"} writes one for each
process into its "directory". Without them nothing is recorded.
"""

import atexit
import functools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from poptorch._logging import logger

_Object = TypeVar("_Object")


class Channel:
    """A named group of spans.

    Args:
        name: goes before the names of its spans.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @contextmanager
    def tracepoint(self, name: str) -> Iterator[None]:
        """Record what happens inside as one span, if anything is recorded."""
        if not _recorder.enabled:
            yield
            return
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            _recorder.add(self._name, name, began, time.perf_counter_ns())

    def instrument(self, obj: _Object, *methods: str) -> _Object:
        """Record each call of these methods of an object; return the object."""
        if _recorder.enabled:
            for method in methods:
                setattr(obj, method, self._traced(method, getattr(obj, method)))
        return obj

    def _traced(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return method(*args, **kwargs)

        return call


class _Recorder:
    """The spans of this process, in the form of Chrome's trace events.

    Args:
        path: where `write` puts them; None records nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._process = os.getpid()
        self._events: list[dict[str, Any]] = []

    @property
    def enabled(self) -> bool:
        """Whether spans are recorded: in the process that began, not in a fork of it."""
        return self._path is not None and os.getpid() == self._process

    def add(self, channel: str, name: str, began_ns: int, ended_ns: int) -> None:
        """Record one span."""
        self._events.append(
            {
                "name": f"{channel}.{name}",
                "cat": channel,
                "ph": "X",
                "ts": began_ns / 1000,  # microseconds, as the format wants
                "dur": (ended_ns - began_ns) / 1000,
                "pid": self._process,
                "tid": threading.get_native_id(),
            }
        )

    def write(self) -> None:
        """Write the file; a failure is logged, since it must not change how a program ends."""
        if not self.enabled or self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"traceEvents": self._events}), encoding="utf-8")
        except OSError as error:
            logger.warning("The trace could not be written to %s: %s", self._path, error)


def _path() -> Path | None:
    """The file that the environment asks for."""
    if file := os.environ.get("IPU_DYNAMO_TRACE"):
        return Path(file).absolute()
    text = os.environ.get("PVTI_OPTIONS") or "{}"
    try:
        options = json.loads(text)
    except json.JSONDecodeError:
        options = None
    if not isinstance(options, dict):
        logger.warning("PVTI_OPTIONS is no JSON object, nothing is traced: %s", text)
        return None
    if str(options.get("enable", "false")).lower() != "true":
        return None
    return Path(options.get("directory", "."), f"{os.getpid()}.trace.json").absolute()


def poptorchAtExit() -> None:
    """Do what is left to do when a program ends: write the trace."""
    _recorder.write()


_recorder = _Recorder(_path())
atexit.register(poptorchAtExit)

__all__ = ["Channel"]
