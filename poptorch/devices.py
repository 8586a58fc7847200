"""Let two executors that ask for the same IPUs by number have them only in turn."""

import os
import time
import weakref

from poptorch.errors import createPoptorchError

_POLL_SECONDS = 15.0
_WAIT = "POPTORCH_WAIT_FOR_IPU"  # environment variable: 1 waits where IPUs are busy
_holders: "weakref.WeakValueDictionary[int, object]" = weakref.WeakValueDictionary()


def acquire(ipu_id: int | None, holder: object) -> None:
    """Reserve IPUs for `holder`. Without a number any will do, and there are always enough.

    Raises:
        poptorch.Error: somebody else has them, and POPTORCH_WAIT_FOR_IPU is not set.
    """
    if ipu_id is None:
        return
    while _holders.setdefault(ipu_id, holder) is not holder:
        if os.environ.get(_WAIT, "0") in ("", "0"):
            raise createPoptorchError(
                f"Failed to acquire the IPUs with id {ipu_id}: another executor has them. Call "
                f"detachFromDevice() on it, or set {_WAIT}=1",
                id="device",
            )
        time.sleep(_POLL_SECONDS)


def release(ipu_id: int | None, holder: object) -> None:
    """Give the IPUs back; no-op for who does not have them."""
    if ipu_id is not None and _holders.get(ipu_id) is holder:
        del _holders[ipu_id]
