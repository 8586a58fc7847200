"""List all nodes of a captured graph that no IPU runs, with lines and advice."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.dynamo import unbacked_symbols
from ipu_dynamo.capture.private.tracing import pytree
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.ops.private.graphs import HigherOrderOperator, OpOverload, OpOverloadPacket
from ipu_dynamo.ops.private.node_meta import EXAMPLE_VALUE

_OWN = frozenset(
    {"aten", "prims", "prim", "ipu", "_c10d_functional", "higher_order", "mkldnn", "torch_nn"}
)
_INLINED = frozenset(
    {"tag_activation_checkpoint", "autograd_function_apply", "invoke_subgraph", "register_hook"}
)
_INSTEAD = {  # what to set where a library has a form of its operator that PyTorch knows
    "transformers.grouped_mm_fallback": 'set experts_implementation="batched_mm" in the '
    "configuration of the model",
}
_WITHOUT_IT = "write it with PyTorch's operators, or call it outside of the compiled model"
_SHAPE = (
    "the shape of a result depends on the values of a tensor",
    "programs have static shapes: mask with torch.where, pad to the largest size, or move this "
    "out of the compiled model",
)


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """An operator that cannot be placed.

    Args:
        operator: its name.
        count: how often it is called for this reason.
        where: the line of the first call.
        reason: why not.
        hint: what to do.
    """

    operator: str
    count: int
    where: str
    reason: str
    hint: str

    def __str__(self) -> str:
        return (
            f"{self.count} x {self.operator}: {self.reason}\n"
            f"  from: {self.where}\n  try:  {self.hint}"
        )


class UnplaceableError(CompileError):
    """A graph holds operators that cannot be placed; `found` lists all of them."""

    id = "operator"

    def __init__(self, found: Sequence[Unplaceable]) -> None:
        count = sum(one.count for one in found)
        what = "operator" if count == 1 else "operators"
        super().__init__(
            "\n".join([f"{count} {what} cannot be placed on an IPU", *map(str, found)]),
            hint='options={"fallback": "warn"}, with which PyTorch runs this graph itself',
        )
        self.found = tuple(found)


def find(gm: fx.GraphModule, examples: Sequence[object]) -> tuple[Unplaceable, ...]:
    """Everything in Dynamo's graph that cannot be placed, in the order of first calls."""
    device = next((x.device for x in examples if isinstance(x, Tensor)), torch.device("cpu"))
    known: set[str] = set()
    graphs = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return _counted(
        (node, why)
        for module in graphs
        for node in module.graph.nodes
        if node.op in ("call_function", "call_method", "placeholder")
        for why in _reasons(node, device, known)
    )


def refuse_sizes_from_values(nodes: Sequence[fx.Node]) -> None:
    """Raise for operators of a flat graph whose results have no size before the program runs."""
    if nodes:
        raise UnplaceableError(_counted((node, _SHAPE) for node in nodes))


def _counted(
    problems: Iterable[tuple[fx.Node, tuple[str, str]]],
) -> tuple[Unplaceable, ...]:
    """One entry for each operator and reason, in the order of first calls."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for node, (reason, hint) in problems:
        lines.setdefault((_name(node), reason, hint), []).append(source_line(node))
    return tuple(
        Unplaceable(name, len(where), where[0], reason, hint)
        for (name, reason, hint), where in lines.items()
    )


def _reasons(node: fx.Node, device: torch.device, known: set[str]) -> Iterator[tuple[str, str]]:
    """Why `node` cannot be placed. `known` collects sizes that depend on values."""
    value = node.meta.get(EXAMPLE_VALUE)
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    new = unbacked_symbols(value) - known
    known |= new
    if new and tensors:  # a number alone may become a tensor: the flat graph shows it
        yield _SHAPE
    for layout in {t.layout for t in tensors if t.layout is not torch.strided}:
        yield f"it makes a tensor of layout {layout}", "use sparse=False, or a dense tensor"
    for other in {t.device for t in tensors if t.device.type != device.type}:
        yield (
            f"its result is on device {other}, and the model is on {device}",
            f"leave the tensor on {device}, or move this out of the compiled model",
        )
    target = node.target
    if isinstance(target, HigherOrderOperator):
        if target.name() not in _INLINED and not target.name().startswith("wrap"):
            yield (
                "it holds a graph or an effect of its own, which programs cannot have yet",
                "replace it by operators, loops or branches, or leave it out of the model",
            )
    elif isinstance(target, OpOverload | OpOverloadPacket):
        namespace = _name(node).partition(".")[0]
        if namespace not in _OWN:
            yield (
                f"it belongs to the library {namespace}, which runs on the host",
                _INSTEAD.get(_name(node).removesuffix(".default"), _WITHOUT_IT),
            )


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return str(target.name())
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(target)
    if node.op == "placeholder":
        return f"input {node.name}"
    if node.op == "call_method":
        return f"Tensor.{target}"
    if target is operator.getitem:
        return "indexing"
    return str(getattr(target, "__name__", target))
