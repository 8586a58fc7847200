"""Decide whether all ranks complete a step: either all do, or each raises the same error.

If a step succeeds everywhere, this costs a reduction along the row and one along the column. Ranks
exchange texts only after a failure or a difference.
"""

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ipu_dynamo.errors import IpuError, RankFailed, RanksDiffer
from ipu_dynamo.runtime.ranks.agreement import gather_values
from ipu_dynamo.runtime.ranks.transport import Among, Transport

_BITS = 62  # of values, so that those and their negatives fit


@dataclass(frozen=True)
class CommonValue:
    """A value that ranks must have in common.

    Args:
        name: of the value, as in "ranks have different learning rates".
        value: a number of at most 62 bits, or a digest of which 62 bits are used.
        among: the ranks that must have the same one: those of the mesh or those of a row.
        parts: makes named texts. Ranks compare them if their values differ.
        parts_among: the ranks whose texts must be the same.
        may_differ: different values are no error if texts of one name are the same. A rank may
            lack a name.
        hint: an action that the user can take today.
    """

    name: str
    value: int
    parts: Callable[[], Mapping[str, str]]
    among: Among = "mesh"
    parts_among: Among = "mesh"
    may_differ: bool = False
    hint: str = "give all ranks the same"


@dataclass(frozen=True)
class StepFailure:
    """An error that a rank met in a step.

    Args:
        place: of the operation in the step's order, the same on all ranks. The error with the
            first place is the cause: others may come of values that a failed rank did not send.
    """

    error: BaseException
    place: tuple[int, ...] = ()


def vote(
    transport: Transport, failure: StepFailure | None = None, equal: Sequence[CommonValue] = ()
) -> list[CommonValue]:
    """Return if all ranks of the mesh agree on a step. They call this together.

    Args:
        failure: of this rank.
        equal: the same ones on all ranks, with the rank's own values.

    Returns:
        The values that differ, and may.

    Raises:
        IpuError: the error of the rank that failed first, as this class and with its fields. It
            has that rank and its host.
        RankFailed: the rank that failed first met an error of another kind.
        RanksDiffer: no rank failed, and a value differs.
        BaseException: this rank's own error, if it failed first or was interrupted.
    """
    failed, differ = _count(transport, failure, equal)
    if not failed and not differ:
        return []
    record: dict[str, Any] = {"host": socket.gethostname(), "values": []}
    if failure is not None:
        record |= {"place": failure.place, "error": _to_json(failure.error)}
    if not failed:
        record["values"] = [[each.value, dict(each.parts())] for each in differ]
    records = gather_values(transport, "mesh", record)
    if failed:
        _raise_cause(transport.share.rank, failure, records)
    for place, each in enumerate(differ):
        of_ranks = [record["values"][place] for record in records]
        if (error := _difference(transport, each, of_ranks)) is not None:
            raise error
    return differ


def _count(
    transport: Transport, failure: StepFailure | None, equal: Sequence[CommonValue]
) -> tuple[bool, list[CommonValue]]:
    """Whether a rank failed, and the values that differ anywhere."""
    pairs = []
    for each in equal:
        value = each.value & ((1 << _BITS) - 1)
        pairs += [value, -value]
    of_row = transport.maximum("row", torch.tensor([int(failure is not None), *pairs])).tolist()
    differ = [largest != -other for largest, other in _pairs(of_row[1:])]
    flags = [int(flag) for flag in differ]
    for place, each in enumerate(equal):
        if each.among == "row":  # other rows may have other values
            of_row[1 + 2 * place : 3 + 2 * place] = 0, 0
    of_all = transport.maximum("column", torch.tensor([*flags, *of_row])).tolist()
    flags, failed, rest = of_all[: len(equal)], of_all[len(equal)], of_all[len(equal) + 1 :]
    found = [
        each
        for each, flag, (largest, other) in zip(equal, flags, _pairs(rest), strict=True)
        if flag or largest != -other
    ]
    return bool(failed), found


def _pairs(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(values[::2], values[1::2], strict=True)


def _difference(
    transport: Transport, equal: CommonValue, of_ranks: Sequence[tuple[int, dict[str, str]]]
) -> RanksDiffer | None:
    """The error of a value that differs; None if it may.

    Args:
        of_ranks: the value and the texts of each rank.
    """
    for ranks in _groups(transport, equal.parts_among):
        names = dict.fromkeys(name for rank in ranks for name in of_ranks[rank][1])
        for name in names:
            having = [r for r in ranks if name in of_ranks[r][1] or not equal.may_differ]
            texts = {rank: of_ranks[rank][1].get(name, "nothing") for rank in having}
            if len({*texts.values()}) > 1:
                return RanksDiffer(f"ranks have different {name}", texts, hint=equal.hint)
    if equal.may_differ:
        return None
    values = {rank: f"digest {value:x}" for rank, (value, _) in enumerate(of_ranks)}
    return RanksDiffer(f"ranks have different {equal.name}", values, hint=equal.hint)


def _groups(transport: Transport, among: Among) -> list[range]:
    """All groups of this kind."""
    share = transport.share
    places = [share.of_rank(rank) for rank in range(share.ranks)]
    of = {
        "mesh": [range(share.ranks)],
        "row": [place.of_row for place in places],
        "column": [place.of_column for place in places],
    }
    return [*dict.fromkeys(of[among])]


def _raise_cause(
    rank: int, failure: StepFailure | None, records: Sequence[Mapping[str, Any]]
) -> None:
    """Raise the error of the rank that failed first, or this rank's own."""
    failed = [other for other, record in enumerate(records) if "error" in record]
    first = min(failed, key=lambda other: (records[other]["place"], other))
    own, host = None if failure is None else failure.error, records[first]["host"]
    if own is not None and (first == rank or not isinstance(own, Exception)):
        if isinstance(own, IpuError):
            _name_rank(own, rank, host)
        raise own
    raise _from_json(records[first]["error"], first, host) from own


def _to_json(error: BaseException) -> dict[str, Any]:
    """An error as JSON: of this package's, also the fields."""
    written: dict[str, Any] = {"class": _class_name(type(error)), "text": str(error)}
    if isinstance(error, IpuError):
        written["fields"] = {name: _value(value) for name, value in vars(error).items()}
    elif isinstance(error, KeyboardInterrupt):
        written["text"] = "it was interrupted"
    else:
        written["text"] = f"{type(error).__name__}: {error}"
    return written


def _value(value: object) -> Any:
    """A field's value as JSON, or its text."""
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return str(value)


def _from_json(written: Mapping[str, Any], rank: int, host: str) -> IpuError:
    """The error of another rank."""
    text, fields = written["text"], written.get("fields", {})
    kind = _classes().get(written["class"])
    if kind is None:
        return RankFailed(f"rank {rank} failed: {text}", rank=rank, host=host)
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    vars(error).update(fields)
    if isinstance(error, RanksDiffer):
        error.values = {int(other): value for other, value in error.values.items()}
    _name_rank(error, rank, host)
    return error


def _name_rank(error: IpuError, rank: int, host: str) -> None:
    """Add to an error which rank met it, unless it names one."""
    if error.rank is None:
        error.rank, error.host = rank, host
        error.args = (f"{error}\n  rank: {rank} ({host})", *error.args[1:])


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _classes() -> dict[str, type[IpuError]]:
    """This package's errors that are known here, by their names."""
    found, waiting = dict[str, type[IpuError]](), [IpuError]
    while waiting:
        kind = waiting.pop()
        found[_class_name(kind)] = kind
        waiting += kind.__subclasses__()
    return found
