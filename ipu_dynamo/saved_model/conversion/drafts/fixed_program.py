"""Fix the rows of a draft at those of a micro-batch, so that all its sizes are numbers.

Before   %x: float32[s0, 8]; %n = sym_size(%x, 0); %y = reshape(%x, [%n, 2, 4])
After    %x: float32[4, 8]; %y = reshape(%x, [4, 2, 4])
Keeps    operators on tensors, their order and names; the draft is not changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.private.graphs import FakeTensorMode, ShapeEnv, module_of
from ipu_dynamo.ops.private.node_meta import CUSTOM
from ipu_dynamo.saved_model.conversion.drafts.draft import Draft, Placement
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup, node_groups
from ipu_dynamo.saved_model.conversion.drafts.specialize import specialize


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The size of a program's micro-batch.

    Attributes:
        size: rows, as they are written down.
        symbol: of the number of rows that calls choose; None: a call is one micro-batch.
    """

    size: int
    symbol: Any = None


@dataclass(frozen=True, slots=True)
class FixedProgram:
    """A flat graph whose values, in `meta["val"]`, have numbers for sizes.

    Attributes:
        inputs, outputs: nodes by name.
        tensors: parameters, buffers and constants by their placeholders.
        nodes: by nodes of the draft, the nodes in their place.
    """

    graph: fx.Graph
    inputs: Mapping[str, fx.Node]
    tensors: Mapping[fx.Node, Tensor]
    outputs: Mapping[str, fx.Node]
    placement: Placement
    micro_batch: MicroBatch
    nodes: Mapping[fx.Node, fx.Node]

    def groups(self) -> tuple[NodeGroup, ...]:
        return node_groups(self.graph)


def micro_batch_of(inputs: Mapping[str, Sequence[Any]], batch_size: int | None) -> MicroBatch:
    """The micro-batch of inputs with these shapes.

    Args:
        inputs: sizes by name: numbers, or symbols where calls choose.
        batch_size: the user's option.

    Raises:
        ValueError: the inputs have another number of rows.
    """
    leading = [shape[0] for shape in inputs.values() if len(shape)]
    shared = len(leading) == len(inputs) > 0 and len({str(size) for size in leading}) == 1
    if not shared:
        return MicroBatch(batch_size or 1)
    size = leading[0]
    if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
        return MicroBatch(batch_size or 1, size.node.expr)
    if isinstance(size, torch.SymInt):
        return MicroBatch(batch_size or 1)
    if batch_size not in (None, size):
        raise ValueError(
            f"batch_size is {batch_size}, and the inputs have {size} rows, which the program has "
            "fixed"
        )
    return MicroBatch(int(size))


def fix_rows(draft: Draft, micro_batch: MicroBatch) -> FixedProgram:
    """The program for `micro_batch.size` rows.

    Raises:
        ValueError: another size is one that calls choose, or that data tell.
    """
    sizes = {} if micro_batch.symbol is None else {micro_batch.symbol: micro_batch.size}
    graph, new = specialize(draft.graph, sizes)
    tensors = {new[node]: tensor for node, tensor in draft.tensors.items()}
    inputs = {name: new[node] for name, node in draft.inputs.items()}
    for name, node in inputs.items():
        _check_fixed(f"input {name!r}", node.meta["val"].shape, sizes)
    _evaluate(graph, tensors, sizes)
    return FixedProgram(
        graph,
        inputs,
        tensors,
        {name: new[node] for name, node in draft.outputs.items()},
        draft.placement,
        micro_batch,
        new,
    )


def _check_fixed(what: str, shape: Sequence[Any], sizes: Mapping[Any, int]) -> None:
    for dimension, size in enumerate(shape):
        if isinstance(size, torch.SymInt) and size.node.expr.subs(sizes).free_symbols:
            raise ValueError(
                f"{what} has dimension {dimension} of a size that calls choose; a compiled "
                "program may leave open only the leading dimension that all inputs share"
            )


def _evaluate(graph: fx.Graph, tensors: Mapping[fx.Node, Tensor], sizes: Mapping[Any, int]) -> None:
    """Write a value with numbers for sizes to every node."""
    mode = FakeTensorMode(shape_env=ShapeEnv())  # which stands for numbers that data tell
    with mode:
        values = [
            mode.from_tensor(tensors[node], static_shapes=True)
            if node in tensors
            else _fixed(node.meta["val"], sizes)
            for node in graph.find_nodes(op="placeholder")
        ]
        _Recorder(module_of(graph)).run(*values)


class _Recorder(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, Tensor):
                    _check_fixed(f"node {n.meta[CUSTOM]['ipu_name']!r}", part.shape, {})
        n.meta = {**n.meta, "val": value}
        return value


def _fixed(value: Tensor, sizes: Mapping[Any, int]) -> Tensor:
    shape = [
        int(size.node.expr.subs(sizes)) if isinstance(size, torch.SymInt) else size
        for size in value.shape
    ]
    return torch.empty(shape, dtype=value.dtype)
