"""Define captures: models as one flat graph each, in which every tensor has a known role.

    Traced   the user's operators, before autograd
    Joint    forward and backward in one functional graph, or one of the two

Both share one `Report`. Passes change them in place, and `Differentiate` makes one of the other.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from ipu_dynamo.capture.outside import OutsideTensor
from ipu_dynamo.ops.library.host_call import KnownFunction
from ipu_dynamo.ops.marks.print_tensor import Printing
from ipu_dynamo.ops.private.graphs import pytree
from ipu_dynamo.program import Overlap
from ipu_dynamo.program.ir.made_names import alone, users

# Keys of node.meta, from the earliest writer to the last reader.
NAME = "ipu.name"  # str: the result of a user's operator, by module and operator; set by NameValues
MATMUL_NAME = "ipu.matmul_name"  # str: a linear layer's result before the bias; likewise
WANTED_GRADIENTS = "ipu.wanted_gradients"  # frozenset: names of the node's of which it is anchored
STAGE = "ipu.stage"  # int: the pipeline stage; set by placement, kept through differentiation
START = "ipu.start"  # bool: the gradient that the backward pass begins with; set by StartBackward
BACKWARD = "ipu.backward"  # bool: the node belongs to the backward pass; after autograd

RANDOM_KEY = alone("random_key")  # input: i32[2], new for every micro-batch and replica
ACCUMULATION_WEIGHT = alone("accumulation_weight")  # input: 1 / (k + 1) at micro-batch k of a step
REPLICA_INDEX = alone("replica_index")  # input: i64[], the number of the replica
LOSS_SCALE = alone("loss_scale")  # variable: f32[], the factor on the loss, where it may change

PlaceholderKind = Literal[
    "parameter",
    "buffer",
    "constant",
    "input",
    "whole",  # the same for all micro-batches of a call
    "random_key",
    "replica",  # which replica it is
    "accumulation",  # the weight of a micro-batch in a mean of those so far
    "loss_scale",  # the factor on the loss, where it may change
    "tangent",
    "token",  # orders operators with an effect; a check needs none
]
STREAMED = (
    "input",
    "random_key",
    "replica",
    "accumulation",
)  # kinds that come anew to every micro-batch
OutputKind = Literal["value", "mutation", "gradient", "count"]


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The role of one input of the graph.

    Args:
        name: dotted name in the module, or the argument's name with its path (`batch['x'][0]`).
        kind: its role.
        trainable: a parameter that takes part in training.
    """

    name: str
    kind: PlaceholderKind
    trainable: bool = False


@dataclass(frozen=True, slots=True)
class OutputRole:
    """The role of one output of the graph.

    It is a returned `value`, the new value of placeholder `name`, or the `count` of the elements
    of a gradient that are not large.
    """

    kind: OutputKind
    name: str


@dataclass(frozen=True, slots=True)
class Structure:
    """How the model's return value is put together from tensors and other Python objects.

    Args:
        spec: nesting of the returned value.
        leaves: the objects in it; the positions in `tensors` are filled at run time.
        tensors: positions of tensors among the leaves, in the order of `value` outputs.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    tensors: tuple[int, ...]

    def rebuild(self, values: list[torch.Tensor]) -> Any:
        leaves = list(self.leaves)
        for position, value in zip(self.tensors, values, strict=True):
            leaves[position] = value
        return pytree.tree_unflatten(leaves, self.spec)


NO_STRUCTURE = Structure(pytree.tree_flatten(())[1], (), ())  # the caller puts results together


@dataclass(frozen=True, slots=True)
class LossScale:
    """A factor on the loss that may change.

    Args:
        name: of its placeholder.
        dtype: of the loss.
        watched: elements of gradients that a micro-batch counts for its next value.
    """

    name: str
    dtype: torch.dtype
    watched: int


@dataclass
class Report:
    """The description of a model besides its graph: one object, from the trace to the program.

    Args:
        structure: how returned values become the user's return value.
        tensors: the user's own tensors, by placeholder name.
        attributes: name and tensor of plain attributes of modules, by the identity of the copy that
            the graph holds; read by `LiftConstants`.
        outside: tensors of the user's that the trace took by their value.
        calls: Python of the graph's custom autograd functions, to be kept with it.
        host_functions: Python that the program calls on the host, to be kept with it.
        overlaps: modes of the inputs and outputs that are marked, by ("input" or "output", name);
            set by `OverlapIO`.
        names: of the values that `AnchorValues` can return.
        gradients: of the parameters and values with a gradient; set by `Differentiate`.
        anchors: the output stream of each anchored value.
        prints: the printed values, by their output streams, in order; set by `PrintTensors`.
    """

    structure: Structure = NO_STRUCTURE
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    attributes: Mapping[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    outside: tuple[OutsideTensor, ...] = ()
    calls: tuple[Callable[..., Any], ...] = ()
    host_functions: tuple[KnownFunction, ...] = ()
    overlaps: Mapping[tuple[str, str], Overlap] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    anchors: Mapping[str, str] = field(default_factory=dict)
    prints: Mapping[str, Printing] = field(default_factory=dict)


@dataclass(kw_only=True)
class Capture:
    """The common part of `Traced` and `Joint`: a graph that passes change in place.

    Invariants: `graph` lints; `placeholders` and `outputs` describe its placeholders and flat
    output tuple, in order. `passes/invariants.py` has those that hold from a pass on.

    Args:
        graph: the flat ATen graph.
        training: whether the graph is to be, or has been, differentiated.
        ipus: IPU of each stage; set by `Placement`.
        keeps_stages: whether all that a stage computes stays in it, also views and constants; set
            by `Placement`.
        separate_last: whether the last stage's forward and backward passes are two functions; set
            with the stages.
        phases: the numbers of each stage's forward and backward phase; empty without phases.
        whole: the model with all its layers, while most of its equal layers are left out; set by
            `ShortenStacks`, gone after `LengthenStacks`.
    """

    graph: fx.GraphModule
    placeholders: tuple[Placeholder, ...]
    outputs: tuple[OutputRole, ...]
    training: bool = False
    ipus: dict[int, int] = field(default_factory=lambda: {0: 0})
    keeps_stages: bool = False
    separate_last: bool = False
    phases: dict[int, tuple[int, int]] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    whole: "Traced | None" = None

    @property
    def placeholder_nodes(self) -> list[fx.Node]:
        return list(self.graph.graph.find_nodes(op="placeholder"))

    @property
    def joined(self) -> bool:
        """Whether the last stage does both its passes at once: one slot of a micro-batch."""
        if not self.phases:
            return not self.separate_last
        forward, backward = self.phases[max(self.phases)]
        return forward == backward

    @property
    def output_node(self) -> fx.Node:
        node: fx.Node = self.graph.graph.output_node()
        return node

    @property
    def returned(self) -> list[fx.Node | None]:
        """The flat output tuple, aligned with `outputs`."""
        return list(self.output_node.args[0])  # type: ignore[arg-type]

    def set_returned(self, nodes: Sequence[fx.Node | None], roles: Sequence[OutputRole]) -> None:
        """Replace the output tuple and the roles of the outputs."""
        self.output_node.args = (tuple(nodes),)
        self.outputs = tuple(roles)

    def return_value(self, node: fx.Node) -> str:
        """Make `node` the last returned value; return the name of its stream."""
        stream = str(sum(role.kind == "value" for role in self.outputs))
        self.set_returned([*self.returned, node], [*self.outputs, OutputRole("value", stream)])
        return stream

    def roles(self) -> dict[fx.Node, Placeholder]:
        """The role of every placeholder node."""
        return dict(zip(self.placeholder_nodes, self.placeholders, strict=True))

    def remove_inputs(self, nodes: Collection[fx.Node]) -> None:
        """Erase placeholders that nothing reads, and their roles; the output returns None instead
        of one."""
        kept = [role for node, role in self.roles().items() if node not in nodes]
        result = self.output_node
        if set(nodes).intersection(result.all_input_nodes):
            result.args = (tuple(None if n in nodes else n for n in self.returned),)
        for node in nodes:
            self.graph.graph.erase_node(node)
        self.placeholders = tuple(kept)


@dataclass(kw_only=True)
class Traced(Capture):
    """A model before autograd: the user's operators, in-place changes and markers among them.

    Args:
        loss: the node that training minimises; known after `IdentityLoss`.
    """

    loss: fx.Node | None = None


@dataclass(kw_only=True)
class Joint(Capture):
    """A functional graph: forward and backward, or one of them.

    Args:
        alone: which pass this is, when forward and backward are two programs that autograd
            connects; None when one program has all of it.
        aliases: returned values may share memory with inputs and with each other.
        loss_scale: the factor on the loss, if it is an input; set by `ScaleLoss`.
        checkpointed: the model marked values to keep where others are computed again; set by
            `Recompute`.
    """

    alone: Literal["forward", "backward"] | None = None
    aliases: bool = False
    loss_scale: LossScale | None = None
    checkpointed: bool = False


def unused(name: str, roles: Sequence[Placeholder]) -> str:
    """`name`, as one of the user's, primed until no role is called so."""
    taken, name = {role.name for role in roles}, users(name)
    while name in taken:
        name += "'"
    return name
