"""Define the prediction of a program: cycles, memory, a verdict, and all that a report shows.

Unless a field says otherwise, cycles are those of one step on one replica: `micro_batches`
micro-batches and, in training, one update. Equal things are one entry with a count. Fields named
after another list hold positions in it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Self

from ipu_dynamo.machine.column_json import read_columns, write_columns
from ipu_dynamo.machine.predicted_memory import IpuMemory, MemoryVerdict
from ipu_dynamo.machine.predicted_operators import CallRow, MarkWord, OperatorBlock, OperatorRow
from ipu_dynamo.machine.predicted_time import IpuCycles, TimelineSection
from ipu_dynamo.machine.text import prediction_text

VERSION = 1  # of the JSON form; raised when a field is added, renamed or removed


@dataclass(frozen=True, slots=True)
class IpuPrediction:
    """The cycles of an IPU of a replica in a step, and its memory."""

    cycles: IpuCycles
    memory: IpuMemory


@dataclass(frozen=True, slots=True)
class MarkShare:
    """The share of all operators' cycles that rests on constants of a mark."""

    mark: MarkWord
    share: float


@dataclass(frozen=True, slots=True)
class Unknown:
    """An operator that is priced without a formula, or by an assumption.

    Args:
        why: what was assumed.
        share: of all operators' cycles.
    """

    operator: str
    why: str
    line: str
    share: float


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of the machine with its source."""

    name: str
    value: float
    unit: str
    mark: MarkWord
    source: str


@dataclass(frozen=True, slots=True)
class Reproduce:
    """How the prediction was made.

    Args:
        command: that makes the same one.
        versions: of this package and others, such as `torch 2.13.0`.
        options: that differ from their defaults.
    """

    command: str
    versions: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of a program on a system of IPUs.

    Args:
        version: of the JSON form.
        model: name of the model, for readers.
        system: name of the system, such as `bow-pod16`.
        kind: of the program; one of `training` has updates.
        num_ipus, replicas, num_stages: of the program.
        micro_batches: of each replica in a step.
        device_iterations: steps in a call.
        micro_batch_rows: rows of the first host input; 0 without host inputs.
        dtypes: machine dtypes of the parameters, most bytes first.
        partials: kinds of the products, such as `16.32`, most cycles first.
        clock: cycles in a second.
        step_seconds: of one update; of a program without an update, of one call.
        cycles: of a call, on replica 0.
        items_per_second: rows of the first host input, of all replicas; None without a host input.
        idle: share of the IPUs' time.
        relayout: share of the operators' cycles.
        limits: one sentence on what limits the step.
        timeline: the sections of a step, in order.
        marks: shares of cycles by mark.
        unknown: operators without a formula.
        notes: effects that the prediction leaves out, for readers.
        machine: the constants of the system.
    """

    version: int
    model: str
    system: str
    kind: Literal["training", "inference", "forward", "backward"]
    num_ipus: int
    replicas: int
    num_stages: int
    micro_batches: int
    device_iterations: int
    micro_batch_rows: int
    dtypes: tuple[str, ...]
    partials: tuple[str, ...]
    clock: float
    step_seconds: float
    cycles: int
    items_per_second: float | None
    idle: float
    relayout: float
    limits: str
    verdict: MemoryVerdict
    ipus: tuple[IpuPrediction, ...]
    modules: tuple[str, ...]
    operators: tuple[OperatorRow, ...]
    blocks: tuple[OperatorBlock, ...]
    calls: tuple[CallRow, ...]
    timeline: tuple[TimelineSection, ...]
    marks: tuple[MarkShare, ...]
    unknown: tuple[Unknown, ...]
    notes: tuple[str, ...]
    machine: tuple[Constant, ...]
    reproduce: Reproduce

    def __str__(self) -> str:
        return prediction_text(self)

    def to_json(self) -> bytes:
        """The prediction as JSON in ASCII; equal predictions give equal bytes."""
        return write_columns(self)

    def without_lines(self) -> Self:
        """The prediction without the user's source lines and names of modules."""
        without: Self = _without_lines(self)
        return replace(without, modules=("",) * len(self.modules))

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Inverse of `to_json`; nothing in it is run.

        Raises:
            ValueError: one line that says what is wrong.
        """
        prediction: Self = read_columns(content, cls, version=VERSION)
        for what, position, count in _positions(prediction):
            if not (-1 if what in _MAY_BE_NONE else 0) <= position < count:
                raise ValueError(f"{what} is {position}; there are {count}")
        return prediction


_MAY_BE_NONE = ("a span's track", "a span's call", "the call of the peak")  # then they are -1


def _without_lines(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_lines, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {each.name: _without_lines(getattr(value, each.name)) for each in fields(value)}
    if "line" in changed:
        changed["line"] = ""
    return replace(value, **changed)


def _positions(prediction: Prediction) -> Iterator[tuple[str, int, int]]:
    """List all positions of a prediction: meaning, value, and length of the list."""
    operators, blocks = len(prediction.operators), len(prediction.blocks)
    calls, ipus = len(prediction.calls), len(prediction.ipus)

    def each(what: str, positions: Iterable[int], count: int) -> Iterator[tuple[str, int, int]]:
        return ((what, position, count) for position in positions)

    yield "the IPU of the verdict", prediction.verdict.ipu, ipus
    for row in prediction.operators:
        yield from each("a use's module", (u.module for u in row.uses), len(prediction.modules))
        yield from each("a use's IPU", (u.ipu for u in row.uses), ipus)
    for block in prediction.blocks:
        yield from each("a block's operator", block.operators, operators)
    yield from each("a call's block", (call.block for call in prediction.calls), blocks)
    yield from each("a call's IPU", (call.ipu for call in prediction.calls), ipus)
    for section in prediction.timeline:
        yield from each("a span's track", (span.track for span in section.spans), ipus)
        yield from each("a span's call", (span.call for span in section.spans), calls)
    for memory in (ipu.memory for ipu in prediction.ipus):
        yield "the call of the peak", memory.peak.call, calls
        yield from each("a memory's block", (b.block for b in memory.blocks), blocks)
        yield from each("a memory's call", (c.call for c in memory.calls), calls)
        of_calls = (c.memory_block for c in memory.calls)
        yield from each("the block of a memory's call", of_calls, len(memory.blocks))
        held = (value.call for c in memory.calls for value in c.held_values)
        yield from each("the call of a held value", held, calls)
