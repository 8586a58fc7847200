"""Move the cross-entropy of a serialised product into the product's loop.

Before   %y = ipu.serialized_matmul(%x: f32[m,k], %w: f32[k,p], "output_channels", 2, False)
         %s = aten._log_softmax(%y, 1, False)
         %l = aten.nll_loss_forward(%s, %t: i64[m], None, 1, -100)
         %loss = %l[0]
         %p = aten.nll_loss_backward(%g: f32[], %s, %t, None, 1, -100, %l[1])
         %d = aten._log_softmax_backward_data(%p, %s, 1, torch.float32)
         %dx = ipu.serialized_matmul(%d, aten.t(%w), "reducing_dim", 2, False)
         return (%loss, %dx)
After    %l = ipu.serialized_loss(%x, %w, %t, 1, -100, "output_channels", 2)
         %l  with meta["ipu.cuts_rows"] = False    # the user did not ask for that
         %loss = %l[0]
         %total = %l[1]
         %sums = %l[2]
         %d = ipu.serialized_loss_backward(
             %g, %x, %w, %t, %total, %sums, 1, -100, "output_channels", 2, False
         )
         %dx = %d[0]
Keeps    shapes, dtypes, stages, source lines; values up to rounding. Neither the logits nor their
         gradient exist whole.
Source   PopTorch user guide, "poptorch.serializedMatMul"; the loop is our own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem

from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.marks.serialized import serialized_matmul_op
from ipu_dynamo.ops.serialized_loss import CUTS_ROWS, serialized_loss, serialized_loss_backward
from ipu_dynamo.passes.graph.builder import call, keep_plan, replace
from ipu_dynamo.passes.joint.serialize_matmul import split_size
from ipu_dynamo.passes.kit import GraphPass

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True, slots=True)
class SerializedLogits:
    """A serialised product that only a cross-entropy reads.

    Args:
        product: the logits.
        loss: the `nll_loss_forward`.
        softmax_backward: gives the gradient of the logits; None when there is no backward pass.
        of_x, of_rhs: the products that read it; None where a factor has no gradient.
    """

    product: fx.Node
    loss: fx.Node
    softmax_backward: fx.Node | None = None
    of_x: fx.Node | None = None
    of_rhs: fx.Node | None = None


def plan(graph: fx.Graph) -> tuple[SerializedLogits, ...]:
    """The heads of a graph."""
    heads = (
        _head(node) for node in graph.find_nodes(op="call_function", target=serialized_matmul_op)
    )
    return tuple(head for head in heads if head is not None)


def _head(product: fx.Node) -> SerializedLogits | None:
    if product.args[2] == "reducing_dim" or product.meta["val"].dim() != 2:
        return None
    split_size(product)  # raises for a factor that is too large
    softmax = _only_reader(product)
    if softmax.target is not aten._log_softmax.default or softmax.meta["val"].dim() != 2:
        return None
    if softmax.args[1] not in (1, -1) or softmax.args[2]:
        return None
    readers = {user.target: user for user in softmax.users}
    loss = readers.pop(aten.nll_loss_forward.default, None)
    if loss is None or loss.args[2] is not None or len(readers) + 1 != len(softmax.users):
        return None
    if not readers:
        return SerializedLogits(product, loss)
    picked = readers.pop(aten.nll_loss_backward.default, None)
    backward = readers.pop(aten._log_softmax_backward_data.default, None)
    if readers or picked is None or backward is None or list(picked.users) != [backward]:
        return None
    products: dict[str, fx.Node] = {}
    for value, reader in _readers(backward):
        if reader.target is not serialized_matmul_op or value.meta["val"].dim() != 2:
            return None
        products["of_x" if reader.args[0] is value else "of_rhs"] = reader
    return SerializedLogits(product, loss, backward, **products)


def _only_reader(node: fx.Node) -> fx.Node:
    """Return the reader of `node`'s rows after changes of leading dims, or the last such change."""
    while len(node.users) == 1:
        (user,) = node.users
        if not _keeps_rows(user):
            return user
        node = user
    return node


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Everything that reads `node`, with the reshaped form that it reads."""
    for user in node.users:
        if _keeps_rows(user):
            yield from _readers(user)
        else:
            yield node, user


def _keeps_rows(node: fx.Node) -> bool:
    if node.target not in _RESHAPES:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return bool(node.meta["val"].shape[-1] == source.meta["val"].shape[-1])


def apply(graph: fx.Graph, head: SerializedLogits) -> None:
    """Replace the product, its loss, and their backward.

    Parts are equally large for each choice of dimension. Fewer rows make products slower, so
    the loop goes over classes unless there are more rows than these. Which dimension the user cut
    is noted: `FuseLoss` may come back to it.
    """
    x, rhs, asked, factor, keep_precision = head.product.args
    rows, classes = head.product.meta["val"].shape
    mode = "output_channels" if classes >= rows else "input_channels"
    _, target, _, reduction, ignore_index = head.loss.args
    with graph.inserting_before(head.loss):
        loop = call(
            graph,
            serialized_loss,
            *(x, rhs, target, reduction, ignore_index, mode, factor),
            origin=head.loss,
        )
        keep_plan(head.product, loop)
        loop.meta[CUTS_ROWS] = asked == "input_channels"
        loss, total, log_sum = (call(graph, getitem, loop, i, origin=head.loss) for i in range(3))
    for old in list(head.loss.users):
        old.replace_all_uses_with((loss, total)[old.args[1]])  # type: ignore[index]
    if head.softmax_backward is None:
        return
    picked = head.softmax_backward.args[0]
    assert isinstance(picked, fx.Node)
    with graph.inserting_before(head.softmax_backward):
        back = call(
            graph,
            serialized_loss_backward,
            *(picked.args[0], x, rhs, target, total, log_sum),
            *(reduction, ignore_index, mode, factor, keep_precision),
            origin=head.softmax_backward,
        )
        for index, gradient in enumerate((head.of_x, head.of_rhs)):
            if gradient is not None:
                keep_plan(gradient, back)
                new = call(graph, getitem, back, index, origin=gradient)
                replace(gradient, new)


class SerializeLoss(GraphPass):
    """The pass."""

    level = "joint"
    acts_on = (serialized_matmul_op,)

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        heads = plan(graph)
        for head in heads:
            apply(graph, head)
        if heads:
            graph.eliminate_dead_code()
        return bool(heads)
