"""Number the processes of a run, for logs and files."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _RecordsWithRank:
    """Makes log records, those of this project with the rank unless it is 0."""

    make: Callable[..., logging.LogRecord]

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self.make(*args, **kwargs)
        if record.name.startswith(_OURS) and (rank := this_rank()):
            record.msg = f"rank {rank}: {record.msg}"
        return record


def name_rank_in_log() -> None:
    """Let log records of this project begin with the rank from now on, except those of rank 0."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, _RecordsWithRank):
        logging.setLogRecordFactory(_RecordsWithRank(make))
