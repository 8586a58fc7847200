"""Write PopTorch's log: its levels, its line format, its destination."""

import logging
import os
import sys
from collections import Counter
from typing import TextIO

TRACE_ALL, TRACE, DEBUG_IR = 3, 5, 8
OFF = logging.CRITICAL + 10

_COMPILER = "ipu_dynamo"

_LEVELS = {
    "TRACE_ALL": TRACE_ALL,
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "DEBUG_IR": DEBUG_IR,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": OFF,
}
_NAMES_OF_INTEGERS = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}

for _name in ("TRACE_ALL", "TRACE", "DEBUG_IR"):
    logging.addLevelName(_LEVELS[_name], _name)


def setLogLevel(level: str | int) -> None:
    """Choose which messages of this package and of its compiler are written.

    Args:
        level: TRACE, TRACE_ALL, DEBUG, DEBUG_IR, INFO, WARN, ERR, OFF, or 0 (TRACE), 1 (DEBUG),
            2 (INFO), 3 (WARN), 4 (ERR), 6 (OFF).
    """
    logger.setLevel(level_number(level))
    setPopartLogLevel(level)


def setPopartLogLevel(level: str | int) -> None:
    """Choose which messages of the compiler alone are written.

    Args:
        level: as for `setLogLevel`.
    """
    _compiler().setLevel(level_number(level))


def level_number(level: str | int) -> int:
    """The number that the standard library's logging uses for one of PopTorch's levels."""
    if isinstance(level, int):
        if level not in _NAMES_OF_INTEGERS:
            raise ValueError(f"Invalid log level integer {level}")
        level = _NAMES_OF_INTEGERS[level]
    if level not in _LEVELS:
        raise ValueError(
            f"Unknown log level: {level}. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN"
        )
    return _LEVELS[level]


def limit_repeats(most: int) -> None:
    """Write an identical message of the compiler at most `most` times from now on."""
    _compiler()
    _repeats.most = most
    _repeats.seen.clear()


def _compiler() -> logging.Logger:
    """The logger of the compiler; from now on it writes to this package's destination."""
    compiler = logging.getLogger(_COMPILER)
    compiler.addHandler(_destination)  # a logger keeps no handler twice
    return compiler


class _Repeats(logging.Filter):
    """Drop a message that the compiler repeats too often.

    Invariant: `seen` counts the messages since the limit was set.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.most = sys.maxsize
        self.seen: Counter[tuple[int, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):  # not the compiler's
            return True
        key = (record.levelno, record.getMessage())
        self.seen[key] += 1
        return self.seen[key] <= self.most


class _Formatter(logging.Formatter):
    """`[time] [logger] [level] message`, with the level in lower case."""

    def __init__(self) -> None:
        super().__init__("[%(asctime)s.%(msecs)03d] [%(name)s] %(level)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.level = f"[{record.levelname.lower()}]"
        return super().format(record)


class _Standard(logging.StreamHandler[TextIO]):
    """Write to the `sys.stderr` or `sys.stdout` of the time of the message."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._name_of_stream = name

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        stream: TextIO = getattr(sys, self._name_of_stream)
        return stream


def _handler() -> logging.Handler:
    destination = os.environ.get("POPTORCH_LOG_DEST") or "stderr"
    handler: logging.Handler
    if destination in ("stderr", "stdout"):
        handler = _Standard(destination)
    else:
        handler = logging.FileHandler(destination, delay=True)
    handler.setFormatter(_Formatter())
    handler.addFilter(_repeats)
    return handler


_repeats = _Repeats()
_destination = _handler()

logger = logging.getLogger("poptorch::python")
logger.propagate = False  # it has a destination of its own
logger.addHandler(_destination)
logger.setLevel(logging.WARNING)

if _wanted := os.environ.get("POPTORCH_LOG_LEVEL"):
    setLogLevel(_wanted)
