"""Write artifacts to PyTorch's structured trace.

`TORCH_TRACE` names a folder for the trace, and tlparse shows it.
"""

import logging
from collections.abc import Callable
from typing import Literal

from torch._logging._internal import LazyTraceHandler, trace_structured

_trace = logging.getLogger("torch.__trace")


def is_tracing() -> bool:
    """Whether artifacts are written anywhere.

    PyTorch always has a handler for its first record, which removes itself if it has no folder.
    """
    return any(
        not isinstance(handler, LazyTraceHandler) or handler.root_dir is not None
        for handler in _trace.handlers
    )


def write_artifact(
    name: str, encoding: Literal["json", "string"], payload: Callable[[], object]
) -> None:
    """Write an artifact, if a trace is written.

    A graph that Dynamo has captured gets it under its own number; other artifacts have no number.

    Args:
        name: tlparse names a file by it.
        payload: makes a text, or a value of which JSON is made; it is called only for a trace.
    """
    if is_tracing():
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": encoding},
            payload_fn=payload,
            expect_trace_id=False,
        )
