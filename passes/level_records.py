"""Describe models above programs as records, which `level_text.py` writes and reads.

A graph is a `TracedGraph` before autograd and a `JointGraph` after it. It is then cut into
`DirectionGraphs` or `StageParts`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from ipu_dynamo.capture.capture import (
    LossScale,
    OutputKind,
    PlaceholderKind,
)
from ipu_dynamo.capture.control_flow.trace_control_flow import Kind
from ipu_dynamo.ops.bodies import Body
from ipu_dynamo.ops.marks.print_tensor import Printing
from ipu_dynamo.passes.levels import Move, Part
from ipu_dynamo.program import Collective, Input, Output, Overlap
from ipu_dynamo.program.ir.layout import Layout


@dataclass(frozen=True)
class GraphInput:
    """An input of a graph.

    Args:
        node: its name in the graph.
        name, kind, trainable: as a `Placeholder` has them.
        tensor: the user's own, where that is laid out in another way than the node's value.
        values: of a constant: its elements in memory, in base64; None: they take too much room.
        memory: of tensors that share memory: the number of that memory, its bytes, and the first
            element in it.
    """

    node: str
    name: str
    kind: PlaceholderKind
    trainable: bool = False
    tensor: Layout | None = None
    values: str | None = ""
    memory: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class GraphOutput:
    """An output of a graph: the name of its node, and its role."""

    node: str | None
    kind: OutputKind
    name: str


@dataclass(frozen=True)
class GraphAttribute:
    """A tensor that a graph holds.

    Args:
        target: its name in the graph.
        name: the user's name.
    """

    target: str
    name: str
    tensor: Layout
    values: str | None


@dataclass(frozen=True)
class GraphHook:
    """The graph that a node calls with a gradient."""

    node: str
    graph: fx.GraphModule


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The common part of traced and joint graphs; see `Capture`. `whole` has one graph or none."""

    ipus: Mapping[int, int] = field(default_factory=lambda: {0: 0})
    training: bool = False
    keeps_stages: bool = False
    separate_last: bool = False
    phases: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    overlaps: Mapping[tuple[str, str], Overlap] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    anchors: Mapping[str, str] = field(default_factory=dict)
    prints: Mapping[str, Printing] = field(default_factory=dict)
    inputs: tuple[GraphInput, ...] = ()
    outputs: tuple[GraphOutput, ...] = ()
    bodies: tuple[Body, ...] = ()
    flows: "tuple[GraphFlow, ...]" = ()
    whole: "tuple[TracedGraph, ...]" = ()
    hooks: tuple[GraphHook, ...] = ()
    attributes: tuple[GraphAttribute, ...] = ()
    graph: fx.GraphModule


@dataclass(frozen=True, kw_only=True)
class TracedGraph(Graph):
    """A graph before autograd; `loss` is the name of its node."""

    loss: str | None = None


@dataclass(frozen=True, kw_only=True)
class JointGraph(Graph):
    """A graph after autograd, of both directions or of one."""

    alone: Literal["forward", "backward"] | None = None
    aliases: bool = False
    gradients: tuple[str, ...] = ()
    loss_scale: LossScale | None = None
    checkpointed: bool = False


@dataclass(frozen=True)
class GraphFlow:
    """A loop or a branch before autograd; see `ControlFlow`. Its node has its number."""

    kind: Kind
    carried: int
    scanned: int
    count: int
    where: str
    bodies: tuple[TracedGraph, ...]


@dataclass(frozen=True, kw_only=True)
class DirectionGraphs:
    """Forward and backward apart."""

    kept: int = 0
    read: tuple[int, ...] = ()
    bodies: tuple[Body, ...] = ()
    forward: fx.GraphModule
    backward: fx.GraphModule


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """The parts of stages, and the graph that was cut, with the roles of their inputs."""

    returned: tuple[str, ...]
    changed: Mapping[str, str] = field(default_factory=dict)
    loads: Mapping[int, Sequence[Move]] = field(default_factory=dict)
    stores: Mapping[int, Sequence[Move]] = field(default_factory=dict)
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    collectives: tuple[Collective, ...] = ()
    bodies: tuple[Body, ...] = ()
    parts: tuple[Part, ...]
    cut: JointGraph
