"""Define the levels that a model goes down.

    traced    the user's operators, before autograd
    joint     forward and backward in one functional graph, or one of the two
    directions  forward and backward apart, where autograd calls them
    parts     one flat graph for each stage and direction
    program   what every IPU does
    host      what this computer does for that

With micro-batches of torch.compile, a joint graph is cut before it goes on:

    split     a joint graph, with the placement of each value on the micro-batches
    pieces    graphs of what runs before the micro-batches, in each of them, and after

An optimiser's traced step has its own levels, down to a part of a program:

    recorded  its operators, on tensors and on Python's numbers
    update    graphs of tensors, and a plan of what is a counter, a state, a hyperparameter
    functions what programs call: functions of numbers, and of one parameter each
    function  one of these, as this computer runs it

`invariants.py` lists the invariants of each level, and the passes that establish them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from ipu_dynamo.capture.capture import ACCUMULATION_WEIGHT, Joint, Traced
from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.passes.micro_batch.placements import Piece, Split
from ipu_dynamo.passes.update_levels import UpdateFunctions, UpdateGraphs
from ipu_dynamo.program import (
    Accumulation,
    Collective,
    Direction,
    Function,
    HostProgram,
    Input,
    Output,
    Program,
    graph_outputs,
)
from ipu_dynamo.program.ir.types import TensorType

Level = Literal[
    "traced",
    "joint",
    "directions",
    "parts",
    "program",
    "host",
    "split",
    "pieces",
    "recorded",
    "update",
    "functions",
    "function",
]


@dataclass(frozen=True, slots=True)
class PartWrite:
    """A write of a part to a variable.

    Args:
        target: the variable.
        value: a result of the part; of the last piece of a part, also of an earlier piece.
        rule: how it enters an accumulator, or `buffer`: it replaces the old value at the end of the
            stage pass.
        parameter: whose gradient it is, or a term of it; empty for other values.
    """

    target: str
    value: str
    rule: Accumulation | Literal["buffer"]
    parameter: str = ""

    @property
    def weight(self) -> str | None:
        """The received value that says by how much a mean moves."""
        return ACCUMULATION_WEIGHT if self.rule == "mean" else None


@dataclass
class Part:
    """The work of one stage in one direction: a pure function, and the uses of its results.

    Args:
        inputs: names of placeholders and of values that earlier parts made, in calling order.
        outputs: names of the values that `graph` returns.
        writes: its writes to variables, in order.
        phase: when it runs, in a phased strategy.
        name: of its function, if that is not made of direction and stage.
        turn: after how many exchanges of replicas it comes in its stage and direction.
    """

    stage: int
    direction: Direction
    ipu: int
    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[PartWrite, ...] = ()
    phase: int | None = None
    name: str = ""
    turn: int = 0

    @property
    def gradients(self) -> tuple[str, ...]:
        """The parameters whose gradients, or terms of them, it writes to accumulators."""
        return tuple(dict.fromkeys(w.parameter for w in self.writes if w.parameter))

    @property
    def counter(self) -> str | None:
        """The accumulator to which it adds a number of elements of gradients, if there is one."""
        counters = [w.target for w in self.writes if w.rule != "buffer" and not w.parameter]
        return counters[0] if counters else None

    @property
    def reads(self) -> tuple[str, ...]:
        """Return its inputs, and the values that its writes need besides its own results."""
        further = [name for w in self.writes for name in (w.value, w.weight) if name is not None]
        own = {*self.inputs, *self.outputs}
        return (*self.inputs, *dict.fromkeys(name for name in further if name not in own))

    @property
    def function_name(self) -> str:
        """Return the name for its function."""
        prefix = "step" if self.direction == "forward_backward" else self.direction
        turn = f"_turn{self.turn}" if self.turn else ""
        return self.name or f"{prefix}{self.stage}{turn}"


@dataclass(frozen=True, slots=True)
class Move:
    """A value goes to streaming memory or comes back.

    Args:
        value: name of a part's result, or of a stream.
        owner: the IPU that made or received it, and stores it.
        ipu: the IPU that stores or loads it.
        phase: when it moves.
        until: of a load, the phase that reads it.
    """

    value: str
    owner: int
    ipu: int
    phase: int
    until: int = 0


@dataclass(frozen=True, slots=True)
class Moves:
    """The values to load before, and to store after, the part with a given index."""

    loads: dict[int, list[Move]] = field(default_factory=dict)
    stores: dict[int, list[Move]] = field(default_factory=dict)


@dataclass(frozen=True)
class Partitioned:
    """The parts, in the order in which a micro-batch runs them.

    Args:
        returned: for each `value` output of the capture, the name of its value.
        changed: for each input that the model changes in place, the name of its new value.
        capture: the graph that was cut, with the roles of its inputs.
        collectives: exchanges of replicas between parts, by result.
        moves: the values that leave the chip between phases; `OffloadActivations` plans them.
        inputs, outputs: values that the host brings and gets, from `EmitStreams` on.
    """

    parts: tuple[Part, ...]
    returned: tuple[str, ...]
    changed: dict[str, str]
    capture: Joint = field(repr=False, compare=False)
    moves: Moves = field(default_factory=Moves)
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    collectives: Mapping[str, Collective] = field(default_factory=dict)

    @property
    def reads(self) -> set[str]:
        """Return the names of values that are returned, exchanged by replicas, or read by parts."""
        read = {*self.returned, *self.changed.values()}
        read.update(collective.value for collective in self.collectives.values())
        read.update(name for part in self.parts for name in part.reads)
        return read

    @property
    def named(self) -> set[str]:
        """Return the names of inputs and outputs of parts."""
        return {name for part in self.parts for name in (*part.inputs, *part.outputs)}

    @property
    def types(self) -> dict[str, TensorType]:
        """Return the types of the values that parts make, by name."""
        return {
            name: TensorType.of(node.meta["val"])
            for part in self.parts
            for name, node in zip(part.outputs, graph_outputs(part.graph), strict=True)
        }


@dataclass(frozen=True)
class Directions:
    """A joint graph that was cut in two; forward returns its values that backward reads.

    Args:
        kept: of a body: how many values forward returns for backward, which takes them first.
        read: of a body: numbers of the inputs that backward takes after these.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    kept: int = 0
    read: tuple[int, ...] = ()


@dataclass(frozen=True)
class SplitCapture:
    """A joint graph of a whole batch, and how it runs on one micro-batch after the other."""

    capture: Joint
    split: Split


@dataclass(frozen=True)
class BatchPieces:
    """The pieces that run before the micro-batches, in each of them, and after.

    Args:
        pieces: those that do anything, in order.
        names: where each output of the graph is found: a result of a piece, or a placeholder.
    """

    pieces: tuple[Piece, ...]
    names: tuple[str, ...]
    split: Split = field(repr=False, compare=False)


Update = RecordedUpdate | UpdateGraphs | UpdateFunctions | Function
Batch = SplitCapture | BatchPieces
Model = Traced | Joint | Directions | Partitioned | Program | HostProgram | Batch | Update


def level_of(model: Model) -> Level:
    """The level that a model is at."""
    levels: dict[type, Level] = {
        Traced: "traced",
        Joint: "joint",
        HostProgram: "host",
        Program: "program",
        Directions: "directions",
        Partitioned: "parts",
        SplitCapture: "split",
        BatchPieces: "pieces",
        RecordedUpdate: "recorded",
        UpdateGraphs: "update",
        UpdateFunctions: "functions",
        Function: "function",
    }
    return levels[type(model)]
