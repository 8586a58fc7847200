"""Find the one value that training minimises.

Before   capture.training = True
         %l = aten.cross_entropy_loss(%x: f32[m,n], %y: i64[m])
         %m = ipu.identity_loss(%l, "sum")
After    the same
         capture.loss = %m  # the marked value that feeds no other marked value
Keeps    the graph.
Source   PopTorch user guide, "Creating custom losses"; 3.4 recognises these torch losses.
"""

from torch import fx

from ipu_dynamo import noted_warnings
from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import written_arguments
from ipu_dynamo.ops.marks.markers import identity_loss_op
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.traced.loss.results_past_the_loss import past_the_loss

LOSSES = frozenset(
    {
        identity_loss_op,
        aten.l1_loss.default,
        aten.mse_loss.default,
        aten.cross_entropy_loss.default,
        aten.nll_loss.default,
        aten.nll_loss2d.default,
        aten.nll_loss_nd.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_with_logits.default,
        aten.kl_div.default,
        aten.poisson_nll_loss.default,
        aten.hinge_embedding_loss.default,
        aten.smooth_l1_loss.default,
        aten.soft_margin_loss.default,
        aten.cosine_embedding_loss.default,
        aten.margin_ranking_loss.default,
        aten.triplet_margin_loss.default,
        aten.ctc_loss.IntList,
        aten.ctc_loss.Tensor,
    }
)


def plan(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The marked values that feed no other marked value, in graph order."""
    feeds: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for user in _readers(node):
            if user in feeds or user.target in LOSSES:
                feeds.add(node)
    return tuple(n for n in graph.nodes if n.target in LOSSES and n not in feeds)


class IdentityLoss(Pass):
    """The pass. `output` names the returned tensor to minimise; None: the marked value."""

    level = "traced"
    needed = "training has to know what it minimises"

    output: int | None = None

    def __call__(self, capture: Traced) -> bool:
        if not capture.training or capture.loss is not None:
            return False
        capture.loss = self._named(capture) if self.output is not None else self._marked(capture)
        return True

    def _named(self, capture: Traced) -> fx.Node:
        returned = capture.returned
        assert self.output is not None
        if not 0 <= self.output < len(returned):
            raise CompileError(
                f"the loss is to be output {self.output}, but the model returns "
                f"{len(returned)} tensors",
                hint="count the returned tensors from 0, nested ones in order",
                id="loss",
            )
        loss = returned[self.output]
        assert loss is not None
        return loss

    def _marked(self, capture: Traced) -> fx.Node:
        final = plan(capture.graph.graph)
        if not final:
            raise CompileError(
                "Couldn't find a loss in graph!",
                hint="compute the loss in forward and return it: a torch loss, or "
                'identity_loss(value, "mean"); a call then does backward() and the optimizer\'s '
                "step(), too",
                id="loss",
            )
        if len(final) > 1:
            names = ", ".join(f"%{node.name}" for node in final)
            raise CompileError(
                f"Multiple independent losses found in graph. Graph must have one final loss. "
                f"Wrap final graph loss in poptorch.identity_loss. Found {names}",
                node=final[-1],
                hint='identity_loss(loss1 + loss2, "none")',
                id="loss",
            )
        if (result := past_the_loss(capture, final[0])) is not None:
            noted_warnings.warn(
                f"training minimises %{final[0].name} ({source_line(final[0])}), and not the "
                f"returned %{result.name} ({source_line(result)}), which is computed from it; to "
                f'minimise that, return identity_loss(value, "none") of it, or name it: loss=...',
            )
        return final[0]


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read the results of `node`, also through a tensor changed in place."""
    readers = list(node.users)
    readers += [user for arg in written_arguments(node) for user in arg.users if node < user]
    return readers
