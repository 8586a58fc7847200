"""Keep a warning of Inductor from users who can do nothing about it.

`standalone_compile` warns where a stage left nothing for Inductor's own cache, for instance with an
operator that Inductor does not cache. The stage is compiled and runs; only a later process has to
compile it again. With one message per stage it hides those that matter.
"""

import logging

_NOISE = "standalone_compile artifact generation failed"


def _matters(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NOISE)


def mute() -> None:
    """Drop the warning from now on; other messages of that logger stay."""
    logging.getLogger("torch._inductor.standalone_compile").addFilter(_matters)
