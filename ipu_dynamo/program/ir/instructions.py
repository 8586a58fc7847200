"""Define the instructions that passes emit and the runtime executes, one line of text each."""

from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.ops.marks.overlap import Overlap
from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.program.ir.clipping import ClipFactor, ClipValues, GradientNorm
from ipu_dynamo.program.ir.coupled_update import JointUpdate, UpdatePart
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_factors import UpdateFactors
from ipu_dynamo.program.ir.update_rules import Rule
from ipu_dynamo.program.ir.writes import Accumulate, Direction, WriteBuffer, in_phase

_PLURAL = {"device_iteration": "device iterations", "micro_batch": "micro-batches"}
Order = Literal["sequential", "pipelined"]


@dataclass(frozen=True, slots=True)
class Receive:
    """Read the next micro-batch of a host stream into IPU memory.

    With an overlap the transfer takes place while the micro-batch before is computed; that of the
    first micro-batch of the loop stands alone.
    """

    stream: str
    result: str
    ipu: int
    overlap: Overlap = "no_overlap"

    def __str__(self) -> str:
        ahead = _within(self.overlap, "ahead")
        return f"receive %{self.result} = host.{self.stream}  -> ipu{self.ipu}{ahead}"


@dataclass(frozen=True, slots=True)
class Send:
    """Offer a value to a host stream, whose return rule decides whether it is kept.

    With an overlap the transfer takes place while the next micro-batch is computed; that of the
    last micro-batch of the loop stands alone.
    """

    stream: str
    value: str
    ipu: int
    source: str
    overlap: Overlap = "no_overlap"

    def __str__(self) -> str:
        later = _within(self.overlap, "later")
        return f"send host.{self.stream} = %{self.value}  <- ipu{self.ipu}{later}"


def _within(overlap: Overlap, when: str) -> str:
    if overlap == "no_overlap":
        return ""
    loop = {"accumulation_loop": "device iteration", "device_iteration_loop": "call"}[overlap]
    return f", one micro-batch {when} within a {loop}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a value from one IPU to another, which knows it as `result`."""

    value: str
    result: str
    type: TensorType
    src: int
    dst: int
    source: str

    def __str__(self) -> str:
        return f"copy {_moved(self)}  ipu{self.src} -> ipu{self.dst}"


@dataclass(frozen=True, slots=True)
class Call:
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
    """

    function: str
    ipu: int
    stage: int
    direction: Direction
    arguments: tuple[str, ...]
    results: tuple[str | None, ...]
    source: str
    phase: int | None = None

    @property
    def stage_pass(self) -> tuple[int, int, Direction, int | None]:
        """What calls that are parts of one stage pass have in common."""
        return self.ipu, self.stage, self.direction, self.phase

    def __str__(self) -> str:
        results = ", ".join(f"%{name}" if name else "none" for name in self.results)
        arguments = ", ".join(f"%{name}" for name in self.arguments)
        where = f"on ipu{self.ipu}{in_phase(self.phase)}"
        return f"({results}) = call @{self.function}({arguments})  {where}"


@dataclass(frozen=True, slots=True)
class Store:
    """Move a value from an IPU to streaming memory, which knows it as `result`.

    Its room on the chip is free afterwards. A variable keeps its name on both sides; of one in
    shards each replica stores its `shard`, which has the given type.
    """

    value: str
    result: str
    type: TensorType
    ipu: int
    phase: int | None
    source: str
    shard: bool = False

    def __str__(self) -> str:
        return f"store {_moved(self)}  ipu{self.ipu} -> off chip{in_phase(self.phase)}"


@dataclass(frozen=True, slots=True)
class Load:
    """Bring a value from streaming memory to an IPU, which knows it as `result`.

    A variable that is loaded for a call is on the chip until the call ends. Of one in shards each
    replica loads its `shard`, which has the given type.
    """

    value: str
    result: str
    type: TensorType
    ipu: int
    phase: int | None
    source: str
    shard: bool = False

    def __str__(self) -> str:
        return f"load {_moved(self)}  off chip -> ipu{self.ipu}{in_phase(self.phase)}"


def _moved(move: Copy | Store | Load) -> str:
    origin = "" if move.value == move.result else f" = %{move.value}"
    shard = "shard of " if not isinstance(move, Copy) and move.shard else ""
    return f"{shard}%{move.result}{origin}: {move.type}, {move.type.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class AllGather:
    """Give every replica the whole of a variable, of which each has the part of one shard.

    A variable in shards is whole until the end of the call that it is gathered for, or until it is
    copied to other IPUs. One that every replica holds whole has been updated in shards.

    Args:
        shards: how many replicas have a part each: all, or with `groups` those of a group.
    """

    value: str
    type: TensorType
    shards: int
    ipu: int
    groups: ReplicaGroups | None
    phase: int | None
    source: str

    @property
    def nbytes(self) -> int:
        """What each replica gets from others."""
        return (self.shards - 1) * self.type.shard(self.shards).nbytes

    def __str__(self) -> str:
        origin = f"{self.shards} replicas" if self.groups is None else f"each {self.groups}"
        where = f"on ipu{self.ipu}{in_phase(self.phase)}"
        return f"all_gather %{self.value}: {self.type} from {origin}, {self.nbytes} bytes  {where}"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Sum values over replicas, along their tree; every replica gets its shard of each sum.

    Args:
        values, types: what is summed, and what each replica has of it: the whole.
        shards: how many replicas take part: all, or with `groups` those of a group.
    """

    values: tuple[str, ...]
    types: tuple[TensorType, ...]
    shards: int
    ipu: int
    groups: ReplicaGroups | None = None

    @property
    def nbytes(self) -> int:
        """What each replica gets from others."""
        return (self.shards - 1) * sum(type.shard(self.shards).nbytes for type in self.types)

    def __str__(self) -> str:
        over = "replicas" if self.groups is None else f"each {self.groups}"
        sums = ", ".join(
            f"%{name}: {type.shard(self.shards)}"
            for name, type in zip(self.values, self.types, strict=True)
        )
        return f"reduce_scatter sum over {over} ({sums}), {self.nbytes} bytes  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum values over all replicas, along their tree; every replica gets the sums.

    With `groups` each group has a sum of its own.
    """

    values: tuple[str, ...]
    ipu: int
    groups: ReplicaGroups | None = None

    def __str__(self) -> str:
        names = ", ".join(f"%{name}" for name in self.values)
        over = "replicas" if self.groups is None else f"each {self.groups}"
        return f"all_reduce sum over {over} ({names})  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class Update:
    """Apply one optimiser group's rule to the parameters that live on one IPU.

    Args:
        rule: the equations; its numbers (learning rate, ...) are read at run time.
        group: index of the parameter group whose numbers apply.
        ipu: owner of the parameters, their gradients and states.
        parameters: names of variables.
        gradients: names of accumulators, aligned with `parameters`.
        states: for each of the rule's states, the variables that hold it, aligned likewise.
        divisor: the gradients are divided by it first.
        clear: set the gradients, which are accumulators, to zero afterwards.
        rounding: of parameters in half precision: to the nearest, or up or down at random.
        sharded: the parameters of which each replica updates its shard only.
        loss_scale: a number on the IPU by which gradients are divided, too.
        clip: another one, which clips them.
        function: of a traced rule, what updates one parameter: takes weight, gradient, states and
            `numbers`, gives weight and states.
        numbers: for each parameter, what its call takes from `UpdateFactors` and `JointUpdate`.
        once: it is for one step only, the first.
    """

    rule: Rule
    group: int
    ipu: int
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    states: tuple[tuple[str, tuple[str, ...]], ...]
    divisor: float
    clear: bool
    rounding: Literal["nearest", "stochastic"] = "nearest"
    sharded: tuple[str, ...] = ()
    loss_scale: str | None = None
    clip: str | None = None
    function: str | None = None
    numbers: tuple[tuple[str, ...], ...] = ()
    once: bool = False

    def __str__(self) -> str:
        pairs = ", ".join(
            f"{'shard of ' if p in self.sharded else ''}%{p} by %{g}"
            for p, g in zip(self.parameters, self.gradients, strict=True)
        )
        mean = f" / {self.divisor}" if self.divisor != 1 else ""
        for name in (self.loss_scale, self.clip):
            mean += f" / %{name}" if name else ""
        clear = ", clear" if self.clear else ""
        rounding = ", round at random" if self.rounding == "stochastic" else ""
        rule = f"traced @{self.function}" if self.function else str(self.rule)
        does = f"{rule}{mean}{clear}{rounding}"
        return f"update group {self.group} {does} ({pairs})  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class AdjustLossScale:
    """Halve the loss scale for the next step if many gradients were large, else double it.

    A scale that would leave `smallest` to `largest` stays as it is.

    Args:
        scale: variable, the loss scale.
        within: accumulators, set to zero afterwards: they count elements that are not large.
        watched: how many elements a step counts in all.
        share: halve if more than this share of them is large.
        smallest, largest: normal numbers of the loss's dtype.
        ipu: owner of the loss scale.
        period: do so once in so many steps, by what all of them counted.
        steps, so_far: variables: steps since the last change, and their count; None for a
            period of one step.
    """

    scale: str
    within: tuple[str, ...]
    watched: int
    share: float
    smallest: float
    largest: float
    ipu: int
    period: int = 1
    steps: str | None = None
    so_far: str | None = None

    def __str__(self) -> str:
        counts = ", ".join(f"%{name}" for name in self.within)
        every = f"every {self.period} steps " if self.period > 1 else ""
        return (
            f"adjust %{self.scale} {every}by {self.watched} elements: halve if more than "
            f"{self.share} of them are large, else double, clear ({counts})  on ipu{self.ipu}"
        )


@dataclass(frozen=True, slots=True)
class Repeat:
    """Run `body` `count` times; `over` says what is counted.

    `order` is how the runs relate: one after the other, or as a pipeline, in which each IPU works
    on another one.
    """

    over: Literal["device_iteration", "micro_batch"]
    count: int
    body: tuple["Instruction", ...]
    order: Order = "sequential"

    def __str__(self) -> str:
        order = "" if self.order == "sequential" else f", {self.order}"
        return f"repeat {self.count} over {_PLURAL[self.over]}{order}"


Plain = (  # every instruction but a loop
    Receive
    | Send
    | Copy
    | Call
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
)
Instruction = Plain | Repeat
