"""Record how long parts of a program take on the host, in the trace of the process.

The trace has all that is compiled and run, too: `ipu_dynamo.profile` records a block, and the
environment variable `IPU_DYNAMO_TRACE` names a file for the whole process. `PVTI_OPTIONS` with
{"enable": "true"} writes one for each process into its "directory".
"""

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ipu_dynamo.profiling import recording
from ipu_dynamo.profiling.profile import TRACE, record_process, write_process
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
        """Record the time inside as one span, if a trace is recorded.

        Args:
            name: of the span, which follows that of the channel.
        """
        with recording.span(f"{self._name}.{name}", self._name):
            yield

    def instrument(self, obj: _Object, *methods: str) -> _Object:
        """Record each call of an object's methods; return the object.

        Nothing changes unless a trace is being recorded at this time.

        Args:
            obj: gets attributes that record and then call its methods.
            methods: names of methods.
        """
        if recording.active:
            for method in methods:
                setattr(obj, method, self._traced(method, getattr(obj, method)))
        return obj

    def _traced(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return method(*args, **kwargs)

        return call


def _path() -> Path | None:
    """The file that `PVTI_OPTIONS` asks for, unless another variable names one."""
    if os.environ.get(TRACE):
        return None
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
    """Write the trace, when a program ends."""
    write_process()


if _file := _path():
    record_process(_file)

__all__ = ["Channel"]
