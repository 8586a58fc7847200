"""Add products, and rows of tables, to the accumulators of gradients as soon as they are there.

Before   %p = aten.mm(%a, %b);  aten.add_(%w_grad, aten.t(%p))
         %e = aten.embedding_dense_backward(%rows, %tokens, ...);  aten.add_(%w_grad, %e)
After    ipu.accumulate_matmul(%w_grad, True, %a, %b);  ...
         ipu.accumulate_rows(%w_grad, %tokens, %rows)
Keeps    shapes, dtypes, source lines; values up to the order of one sum. No gradient exists beside
         its accumulator, which is read and written once, and a tied table's first contribution is
         not kept until the last one is there.
Source   the `beta` of BLAS's `gemm`, which adds to a matrix what it computes.
"""

from dataclasses import dataclass
from functools import partial

from torch import fx

from ipu_dynamo.ops.accumulate import accumulate_matmul
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.graph.gradient_sums import (
    add_rows,
    adds_in_order,
    alike,
    erase_unread,
    is_large,
    is_matrix,
    matmul_of,
    rows_are_few,
    untransposed,
)
from ipu_dynamo.passes.host.functions.rewrite_functions import rewrite_functions
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import Decision, HostProgram


@dataclass(frozen=True, slots=True)
class MatmulAccumulation:
    """A term of a gradient whose operator can add it to its accumulator, or store it there.

    Args:
        write: stores or adds the term.
        matmul: the product that it is, perhaps transposed; None: it is a table with few rows.
        transposed: the accumulator has the dimensions of `matmul` in the other order.
    """

    write: fx.Node
    matmul: fx.Node | None
    transposed: bool

    @property
    def total(self) -> fx.Node:
        """The accumulator."""
        total = self.write.args[0]
        assert isinstance(total, fx.Node)
        return total

    @property
    def term(self) -> fx.Node:
        """What is added."""
        term = self.write.args[1]
        assert isinstance(term, fx.Node)
        return term

    @property
    def adds(self) -> bool:
        """Whether the term is added, and not stored."""
        return self.write.target is aten.add_.Tensor


def plan(graph: fx.Graph, *, all_sizes: bool = False) -> tuple[MatmulAccumulation, ...]:
    """Find the worthwhile accumulations of a function. Reads the graph only.

    Args:
        all_sizes: include small accumulators.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    accumulations = []
    for write in graph.nodes:
        if write.target not in (aten.copy_.default, aten.add_.Tensor) or not _fits(
            write, all_sizes=all_sizes
        ):
            continue
        term = write.args[1]
        matmul = matmul_of(term) if len(term.users) == 1 else None
        earlier = [user for user in write.args[0].users if order[user] < order[write]]
        if matmul is not None and all(order[user] < order[matmul] for user in earlier):
            accumulations.append(MatmulAccumulation(write, matmul, untransposed(term)[1]))
        elif write.target is aten.add_.Tensor and rows_are_few(term) and adds_in_order(term):
            accumulations.append(MatmulAccumulation(write, None, transposed=False))
    return tuple(accumulations)


def _fits(write: fx.Node, *, all_sizes: bool) -> bool:
    """Whether a node writes to an accumulator that is written only, and large."""
    total = write.args[0]
    if not isinstance(total, fx.Node) or total.op != "placeholder" or write.users or write.kwargs:
        return False
    only_written = all(user.args[0] is total and writes(user) for user in total.users)
    rule = "+=" if write.target is aten.add_.Tensor else "store"
    value, term = total.meta["val"], write.all_input_nodes[1:2]
    large = is_matrix(value) if all_sizes else is_large(value, rule)
    return only_written and large and bool(term) and alike(value, term[0].meta["val"])


def apply(graph: fx.Graph, accumulation: MatmulAccumulation) -> None:
    """Write a product at its operator, and rows at the place of their addition."""
    term = accumulation.term
    if accumulation.matmul is not None:
        a, b = accumulation.matmul.args
        with graph.inserting_before(accumulation.matmul):
            if accumulation.transposed:
                a, b = (call(graph, aten.t.default, n, origin=accumulation.matmul) for n in (b, a))
            arguments = accumulation.total, accumulation.adds, a, b
            call(graph, accumulate_matmul, *arguments, origin=accumulation.matmul)
    else:
        with graph.inserting_before(accumulation.write):
            add_rows(graph, accumulation.total, term, origin=accumulation.write)
    graph.erase_node(accumulation.write)
    erase_unread(term)


class AccumulateMatmuls(Pass):
    """The pass. `forced`: whether to rewrite, regardless of size."""

    level = "host"
    acts_on = (aten.copy_.default, aten.add_.Tensor)
    choices = (True, False)

    forced: bool | None = None

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        if self.forced is False:
            return False
        decision = Decision(self.name, "added where they are computed", of="gradients")
        planned = partial(plan, all_sizes=self.forced is True)

        def rewrite(graph: fx.Graph) -> None:
            for accumulation in planned(graph):
                apply(graph, accumulation)

        return rewrite_functions(host, rewrite, planned, decision)
