"""Number the processes of a run, for logs and files."""

import logging
import os
from functools import cache
from typing import Any

import torch.distributed as dist

_OURS = ("ipu_dynamo", "poptorch")  # beginnings of the names of loggers


def this_rank() -> int:
    """The number of this process in the default group, or the one that torchrun gave it, else 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _number("RANK", 0)


def ranks() -> int:
    """How many processes there are together."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _number("WORLD_SIZE", 1)


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise


@cache
def name_rank_in_log() -> None:
    """Let log records of this project begin with the rank from now on, except those of rank 0."""
    make = logging.getLogRecordFactory()

    def made(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith(_OURS) and (rank := this_rank()):
            record.msg = f"rank {rank}: {record.msg}"
        return record

    logging.setLogRecordFactory(made)
