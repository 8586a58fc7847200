"""Find the returned value that users probably meant if training minimises only a part of it.

A torch loss is the loss wherever it is called, as in PopTorch. So operators between it and the
returned value do not train. Examples are the factor of `2 * mse_loss(...)`, the mask after a loss
of each element, and the second term of a sum. Old programs train like that; authors of new ones
need a warning.

Source   PopTorch user guide, "Creating custom losses".
"""

from torch import Tensor, fx

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import is_view, needed_for

_SAME_NUMBERS = frozenset({aten.clone.default, aten.detach.default, aten._to_copy.default})


def past_the_loss(capture: Traced, loss: fx.Node) -> fx.Node | None:
    """Return a differentiable returned value that is computed from `loss`; None: no mistake.

    If the loss itself is returned too, the value must also depend on parameters by another way: a
    perplexity next to its loss is no mistake.
    """
    roles = capture.roles()
    trained = {node for node, role in roles.items() if role.trainable}
    returned = [node for node in capture.returned if node is not None]
    loss_returned = any(_same_numbers(node) is loss for node in returned)
    for node in returned:
        if _same_numbers(node) is loss or not _is_floating(node):
            continue
        sources = _differentiable_sources(node, loss)
        if loss in sources and (not loss_returned or sources & trained):
            return node
    return None


def _same_numbers(node: fx.Node) -> fx.Node:
    """Return the value before copies, casts and views."""
    while is_view(node) or node.target in _SAME_NUMBERS:
        (node, *_) = node.all_input_nodes
    return node


def _differentiable_sources(node: fx.Node, loss: fx.Node) -> set[fx.Node]:
    """The values that a gradient of `node` may reach, those before the loss aside."""
    return needed_for(
        [node], lambda n: n is not loss and n.target is not aten.detach.default and _is_floating(n)
    )


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)
