"""Turn tensors from outside a module into placeholders that hold their present values."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from ipu_dynamo.capture.capture import Capture, Placeholder, unused
from ipu_dynamo.capture.private.tracing import fake_mode, is_fake, to_fake
from ipu_dynamo.capture.swap import Attribute

aten = torch.ops.aten


def lift_constants(capture: Capture, attributes: Mapping[int, Attribute]) -> None:
    """Turn tensors from outside the module into placeholders that hold their present values."""
    graph, tensors = capture.graph.graph, dict(capture.tensors)
    known = {id(attribute.copy): attribute for attribute in attributes.values()}
    roles = list(capture.placeholders)
    lifted_before: dict[str, torch.fx.Node] = {}
    for node in list(graph.find_nodes(op="get_attr")):
        value = getattr(capture.graph, str(node.target))
        if not isinstance(value, Tensor):
            continue
        if str(node.target) in lifted_before:
            node.replace_all_uses_with(lifted_before[str(node.target)])
            graph.erase_node(node)
            continue
        made_inside = all(user.target is aten.lift_fresh_copy.default for user in node.users)
        attribute = known.get(id(value))
        name = unused(attribute.name if attribute else str(node.target), roles)
        if not made_inside:
            warnings.warn(
                f"the tensor {name} {tuple(value.shape)} is neither an input, a parameter nor a "
                f"buffer; its present value becomes a constant of the program",
                stacklevel=2,
            )
        last = capture.placeholder_nodes[-1:]
        with graph.inserting_after(last[0]) if last else graph.inserting_before(None):
            lifted = graph.placeholder(str(node.target).lstrip("_"))
        lifted.meta["val"] = node.meta["val"] if "val" in node.meta else _fake_of(capture, value)
        node.replace_all_uses_with(lifted)
        graph.erase_node(node)
        lifted_before[str(node.target)] = lifted
        roles.append(Placeholder(name, "constant"))
        tensors[name] = (attribute.tensor if attribute else value).detach().clone()
    capture.placeholders, capture.tensors = tuple(roles), tensors


def _fake_of(capture: Capture, value: Tensor) -> Tensor:
    """A fake of `value` in the mode of the graph's other values."""
    for node in capture.graph.graph.nodes:
        if is_fake(node.meta.get("val")):
            return to_fake(node.meta["val"].fake_mode, value)
    return to_fake(fake_mode(), value)
