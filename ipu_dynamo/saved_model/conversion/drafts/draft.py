"""Hold a signature while it is converted: one flat graph, its tensors, and where its nodes go."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup, node_groups

HOST, IPU = "host", "ipu"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where groups of kind OP are, by name; sizes are nowhere.

    Attributes:
        devices: HOST or IPU.
        ipus: the number of the IPU of those that are on one.
        stages: of those in a pipeline; empty without one.
        device_mapping: the IPU of each stage.
    """

    devices: Mapping[str, str] = field(default_factory=dict)
    ipus: Mapping[str, int] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)
    device_mapping: tuple[int, ...] = ()

    def on_ipu(self, name: str) -> bool:
        return self.devices.get(name) == IPU


class Draft:
    """A signature under conversion.

    Invariant: every node except the output has its canonical name, and a value in `meta["val"]`.
    The graph is functional. Its output is a tuple of the values of `outputs`, in this order. Its
    placeholders are those of `inputs` and then those of `tensors`, in this order.

    Attributes:
        module: holds the graph, and no tensors.
        inputs: placeholders of inputs by name.
        tensors: parameters, buffers and constants by their placeholders.
        outputs: the nodes of results by name.
        range_constraints: of sizes that calls choose, as `torch.export` has them.
        defaults: of one row, of inputs that may be left out.
        method_name: as the index has it.
        source_names: all names that the source program had, before any pass.
        placement: the passes' decisions.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: dict[str, fx.Node],
        tensors: dict[fx.Node, Tensor],
        outputs: dict[str, fx.Node],
        *,
        range_constraints: Mapping[Any, Any],
        defaults: Mapping[str, Tensor] | None = None,
        method_name: str = "predict",
    ) -> None:
        self.module, self.inputs, self.tensors, self.outputs = module, inputs, tensors, outputs
        self.range_constraints = dict(range_constraints)
        self.defaults = dict(defaults or {})
        self.method_name = method_name
        self.placement = Placement()
        self.source_names = frozenset(group.name for group in self.groups())

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def groups(self) -> tuple[NodeGroup, ...]:
        """The groups of the graph as it is now, in the order of data."""
        return node_groups(self.graph)
