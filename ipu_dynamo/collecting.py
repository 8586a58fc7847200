"""Let Python's garbage collector look at all objects less often while something is compiled.

Compiling makes a million objects that last, and Python looks at all there are whenever they have
become a quarter more. What dies young is collected as before.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_blocks = 0  # that are being run, in all threads
_before: tuple[int, int, int] | None = None
_RARELY = 10_000, 10, 1_000_000  # the last: collections of the young between two of all objects


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Leave out collections of all objects meanwhile, for the whole process.

    A collector that somebody has switched off, or set to collect less often, stays as it is.
    """
    global _blocks, _before
    with _lock:
        _blocks += 1
        if _blocks == 1 and gc.isenabled() and 0 < gc.get_threshold()[0] <= _RARELY[0]:
            _before = gc.get_threshold()
            gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and _before is not None:
                if gc.get_threshold() == _RARELY:  # else somebody has set another meanwhile
                    gc.set_threshold(*_before)
                _before = None
