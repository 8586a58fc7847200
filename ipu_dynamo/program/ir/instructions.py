"""Define the instructions that passes emit and the runtime executes, one line of text each."""

from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.ops.marks.overlap import Overlap
from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.options.schedule_order import is_order
from ipu_dynamo.program.ir.base_instruction import (
    AFTER,
    BEFORE,
    LOOP,
    BaseInstruction,
    How,
    Moved,
    Place,
    Use,
    listed,
    used,
)
from ipu_dynamo.program.ir.clipping import ClipFactor, ClipValues, GradientNorm
from ipu_dynamo.program.ir.collectives import Collective
from ipu_dynamo.program.ir.rank_streams import ReceiveFromRank, SendToRank
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_instructions import (
    AdjustLossScale,
    JointUpdate,
    Update,
    UpdateFactors,
    UpdatePart,
)
from ipu_dynamo.program.ir.writes import Accumulate, Direction, WriteBuffer, in_phase

_PLURAL = {"device_iteration": "device iterations", "micro_batch": "micro-batches"}
Order = Literal["sequential", "pipelined"]


@dataclass(frozen=True, slots=True)
class Receive(BaseInstruction):
    """Read the next micro-batch of a host stream into IPU memory.

    With an overlap the transfer takes place while the micro-batch before is computed; that of the
    first micro-batch of the loop stands alone.
    """

    sections = LOOP
    done_by = "first"

    stream: str
    result: str
    ipu: int
    overlap: Overlap = "no_overlap"

    @property
    def moves(self) -> tuple[Moved, ...]:
        return (Moved("received", self.stream, self.result, "host", self.ipu),)

    def __str__(self) -> str:
        ahead = _within(self.overlap, "ahead")
        return f"receive %{self.result} = host.{self.stream}  -> ipu{self.ipu}{ahead}"


@dataclass(frozen=True, slots=True)
class Send(BaseInstruction):
    """Offer a value to a host stream, whose return rule decides whether it is kept.

    With an overlap the transfer takes place while the next micro-batch is computed; that of the
    last micro-batch of the loop stands alone.
    """

    sections = LOOP
    done_by = "last there"

    stream: str
    value: str
    ipu: int
    source: str
    overlap: Overlap = "no_overlap"

    @property
    def moves(self) -> tuple[Moved, ...]:
        return (Moved("sent", self.value, self.stream, self.ipu, "host"),)

    def __str__(self) -> str:
        later = _within(self.overlap, "later")
        return f"send host.{self.stream} = %{self.value}  <- ipu{self.ipu}{later}"


def _within(overlap: Overlap, when: str) -> str:
    if overlap == "no_overlap":
        return ""
    loop = {"accumulation_loop": "device iteration", "device_iteration_loop": "call"}[overlap]
    return f", one micro-batch {when} within a {loop}"


@dataclass(frozen=True, slots=True)
class Copy(BaseInstruction):
    """Copy a value from one IPU to another, which knows it as `result`."""

    sections = BEFORE | LOOP | AFTER

    value: str
    result: str
    type: TensorType
    src: int
    dst: int
    source: str

    @property
    def moves(self) -> tuple[Moved, ...]:
        return (Moved("copied", self.value, self.result, self.src, self.dst, self.type),)

    def __str__(self) -> str:
        return f"copy {_moved(self)}  ipu{self.src} -> ipu{self.dst}"


@dataclass(frozen=True, slots=True)
class Call(BaseInstruction):
    """Run a function on an IPU.

    Args:
        function: name of the function.
        ipu: where it runs.
        stage: the pipeline stage that it belongs to.
        direction: which pass of the stage it is; `weights` is the part of a backward pass that no
            other IPU waits for.
        arguments: names of variables and values, in the function's order.
        results: names that the returned tensors get; None for an output without a tensor.
        source: first line of the user's model that it computes.
        phase: when it runs, in a phased program.
        turn: after how many exchanges of replicas it comes in its stage and direction.
    """

    sections = LOOP

    function: str
    ipu: int
    stage: int
    direction: Direction
    arguments: tuple[str, ...]
    results: tuple[str | None, ...]
    source: str
    phase: int | None = None
    turn: int = 0

    @property
    def stage_pass(self) -> tuple[int, int, Direction, int | None, int]:
        """The key of its stage pass: calls that are parts of one stage pass have the same."""
        return self.ipu, self.stage, self.direction, self.phase, self.turn

    @property
    def reads(self) -> tuple[Use, ...]:
        return used(self.arguments, self.ipu)

    @property
    def makes(self) -> tuple[Use, ...]:
        return used(tuple(name for name in self.results if name), self.ipu)

    @property
    def ipus(self) -> tuple[int, ...]:
        return (self.ipu,)

    def __str__(self) -> str:
        results = ", ".join(f"%{name}" if name else "none" for name in self.results)
        turn = f", turn {self.turn}" if self.turn else ""
        where = f"on ipu{self.ipu}{in_phase(self.phase)}{turn}"
        return f"({results}) = call @{self.function}({listed(self.arguments)})  {where}"


@dataclass(frozen=True, slots=True)
class Store(BaseInstruction):
    """Move a value from an IPU to streaming memory, which knows it as `result`.

    Its room on the chip is free afterwards. A variable keeps its name on both sides; of one in
    shards each replica stores its `shard`, which has the given type. Through `io_tiles` it overlaps
    with the other tiles' computation.
    """

    sections = LOOP | AFTER
    done_by = "last there"

    value: str
    result: str
    type: TensorType
    ipu: int
    phase: int | None
    source: str
    shard: bool = False
    io_tiles: bool = False

    @property
    def moves(self) -> tuple[Moved, ...]:
        return (_of_chip(self, "stored", self.ipu, "off chip"),)

    def __str__(self) -> str:
        where = f"ipu{self.ipu} -> off chip{in_phase(self.phase)}{_tiles(self)}"
        return f"store {_moved(self)}  {where}"


@dataclass(frozen=True, slots=True)
class Load(BaseInstruction):
    """Bring a value from streaming memory to an IPU, which knows it as `result`.

    A variable that is loaded for a call is on the chip until the call ends. Of one in shards each
    replica loads its `shard`, which has the given type. Through `io_tiles` it overlaps with the
    other tiles' computation.
    """

    sections = BEFORE | LOOP | AFTER
    done_by = "next there"

    value: str
    result: str
    type: TensorType
    ipu: int
    phase: int | None
    source: str
    shard: bool = False
    io_tiles: bool = False

    @property
    def moves(self) -> tuple[Moved, ...]:
        return (_of_chip(self, "loaded", "off chip", self.ipu),)

    @property
    def fetches(self) -> str | None:
        return self.value if self.value == self.result else None

    def __str__(self) -> str:
        where = f"off chip -> ipu{self.ipu}{in_phase(self.phase)}{_tiles(self)}"
        return f"load {_moved(self)}  {where}"


def _of_chip(move: Store | Load, how: How, src: Place, dst: Place) -> Moved:
    of = move.value, move.result, src, dst, move.type, move.shard
    return Moved(how, *of, io_tiles=move.io_tiles, phase=move.phase)


def _tiles(move: Store | Load) -> str:
    return ", through IO tiles" if move.io_tiles else ""


def _over_replicas(
    how: How, name: str, ipu: int, type: TensorType | None = None, shards: int | None = None
) -> Moved:
    return Moved(how, name, name, "replicas", ipu, type, shards=shards)


def _moved(move: Copy | Store | Load) -> str:
    origin = "" if move.value == move.result else f" = %{move.value}"
    shard = "shard of " if not isinstance(move, Copy) and move.shard else ""
    return f"{shard}%{move.result}{origin}: {move.type}, {move.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class AllGather(BaseInstruction):
    """Give every replica the whole of a variable, of which each has the part of one shard.

    A variable in shards is whole until the end of the call that it is gathered for, or until it is
    copied to other IPUs. One that every replica holds whole has been updated in shards.

    Args:
        shards: how many replicas have a part each: all, or with `groups` those of a group.
    """

    sections = BEFORE | LOOP | AFTER

    value: str
    type: TensorType
    shards: int
    ipu: int
    groups: ReplicaGroups | None
    phase: int | None
    source: str

    @property
    def reads(self) -> tuple[Use, ...]:
        return (Use(self.value, self.ipu, self.type, shard=True),)

    @property
    def moves(self) -> tuple[Moved, ...]:
        return (_over_replicas("gathered", self.value, self.ipu, self.type, self.shards),)

    @property
    def fetches(self) -> str | None:
        return self.value

    def __str__(self) -> str:
        origin = f"{self.shards} replicas" if self.groups is None else f"each {self.groups}"
        where = f"on ipu{self.ipu}{in_phase(self.phase)}"
        return f"all_gather %{self.value}: {self.type} from {origin}, {self.nbytes} bytes  {where}"


@dataclass(frozen=True, slots=True)
class ReduceScatter(BaseInstruction):
    """Sum values over replicas, along their tree; every replica gets its shard of each sum.

    Args:
        values, types: the summed values, and their types on each replica: it has them whole.
        shards: how many replicas take part: all, or with `groups` those of a group.
    """

    sections = AFTER

    values: tuple[str, ...]
    types: tuple[TensorType, ...]
    shards: int
    ipu: int
    groups: ReplicaGroups | None = None

    @property
    def writes(self) -> tuple[Use, ...]:
        return used(self.values, self.ipu, shard=True)

    @property
    def moves(self) -> tuple[Moved, ...]:
        return tuple(
            _over_replicas("scattered", name, self.ipu, type, self.shards)
            for name, type in zip(self.values, self.types, strict=False)
        )

    def __str__(self) -> str:
        over = "replicas" if self.groups is None else f"each {self.groups}"
        sums = ", ".join(
            f"%{name}: {type.shard(self.shards)}"
            for name, type in zip(self.values, self.types, strict=True)
        )
        return f"reduce_scatter sum over {over} ({sums}), {self.nbytes} bytes  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class AllReduce(BaseInstruction):
    """Sum values over all replicas, along their tree; every replica gets the sums.

    With `groups` each group has a sum of its own.
    """

    sections = AFTER

    values: tuple[str, ...]
    ipu: int
    groups: ReplicaGroups | None = None

    @property
    def writes(self) -> tuple[Use, ...]:
        return used(self.values, self.ipu, shard=True)

    @property
    def moves(self) -> tuple[Moved, ...]:
        size = None if self.groups is None else self.groups.size
        return tuple(
            _over_replicas("all_reduced", name, self.ipu, shards=size) for name in self.values
        )

    def __str__(self) -> str:
        over = "replicas" if self.groups is None else f"each {self.groups}"
        return f"all_reduce sum over {over} ({listed(self.values)})  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class Repeat(BaseInstruction):
    """Run `body` `count` times; `over` says what is counted.

    `order` is how the runs relate: one after the other, or as a pipeline, in which each IPU works
    on another one. `schedule` is the order of a training pipeline, by name or as the text of
    `options/schedule_order.py`; "" is PopTorch's.
    """

    over: Literal["device_iteration", "micro_batch"]
    count: int
    body: tuple["Instruction", ...]
    order: Order = "sequential"
    schedule: str = ""

    def __str__(self) -> str:
        order = "" if self.order == "sequential" else f", {self.order}"
        name = "an order of its own" if is_order(self.schedule) else self.schedule
        order += f", {name}" if name else ""
        return f"repeat {self.count} over {_PLURAL[self.over]}{order}"


Plain = (  # every instruction but a loop
    Receive
    | Send
    | Copy
    | Call
    | Collective
    | Accumulate
    | WriteBuffer
    | Store
    | Load
    | AllGather
    | ReduceScatter
    | AllReduce
    | GradientNorm
    | ClipFactor
    | ClipValues
    | UpdateFactors
    | UpdatePart
    | JointUpdate
    | Update
    | AdjustLossScale
    | SendToRank
    | ReceiveFromRank
)
Instruction = Plain | Repeat
