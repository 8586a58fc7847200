"""Choose which forward values to keep for the backward pass, at a price for each byte.

A value that the backward pass needs is kept or computed again. To keep it costs its bytes. To
compute it again costs the time of its operator, and the backward pass then needs the operator's
inputs. The cheapest choice for all values together is a minimum cut. Each value is two nodes. The
first is on the sink's side of the cut if the operator is repeated, the second if the backward pass
has the value.

Source: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization"
(2020), for the costs; functorch's partitioner keeps values by such a cut, by bytes alone.
"""

from collections.abc import Callable, Container

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov, build_residual_network
from torch import fx

from ipu_dynamo.capture.capture import BACKWARD, STAGE
from ipu_dynamo.ops.graph_queries import nbytes, owner
from ipu_dynamo.ops.library.replica_collectives import COLLECTIVES
from ipu_dynamo.ops.operator_costs import seconds
from ipu_dynamo.ops.serialized_loss import serialized_loss

_UNIT = 1e15  # costs are whole numbers of so many parts of a second, so that sums are exact
_STEPS = 32  # of a bisection over prices


def values(graph: fx.Graph, stages: Container[int]) -> list[fx.Node]:
    """Return the forward operators of `stages` that own the memory of their results, in order."""
    return [node for node in graph.nodes if _of_forward(node, stages) and owner(node) is node]


def repeatable(node: fx.Node) -> bool:
    """Whether the value of a forward operator may be computed again."""
    return owner(node).target not in (serialized_loss, *COLLECTIVES)


class KeptValues:
    """The values to keep besides `kept`, for one price of a byte after the other.

    Invariant: `_residual` has the capacities of the last price. Only those of bytes depend on it.

    Args:
        highest: seconds; no byte will cost more.
    """

    def __init__(
        self, graph: fx.Graph, stages: Container[int], kept: set[fx.Node], highest: float
    ) -> None:
        self._network = network = nx.DiGraph()
        self._own = [node for node in values(graph, stages) if node not in kept]
        inside = set(self._own)
        network.add_nodes_from(("made", "read"))
        for node in self._own:
            often = round(seconds(node) * _UNIT)
            again = {"capacity": often} if repeatable(node) else {}  # none: it must not be cut
            network.add_edge("made", (node, 0), **again)
            network.add_edge((node, 0), (node, 1), capacity=_cost(node, highest))
        for node in graph.nodes:
            backward = node.op == "call_function" and node.meta[BACKWARD]
            for source in map(owner, node.all_input_nodes):
                if source in inside and backward:
                    network.add_edge((source, 1), "read")
                elif source in inside and owner(node) is not source and owner(node) in inside:
                    network.add_edge((source, 1), (owner(node), 0))
        # It stands for no capacity by a number above all sums of capacities, here at `highest`.
        self._residual = build_residual_network(network, "capacity")

    def cheapest(self, price: float) -> set[fx.Node]:
        """Return the values to keep when a byte costs `price` seconds."""
        for node in self._own:
            if nbytes(node):  # others have no edge there
                self._residual[node, 0][node, 1]["capacity"] = _cost(node, price)
        _, (side, _) = nx.minimum_cut(
            self._network,
            "made",
            "read",
            flow_func=boykov_kolmogorov,
            residual=self._residual,
        )
        return {node for node in self._own if (node, 0) in side and (node, 1) not in side}


def _cost(node: fx.Node, price: float) -> int:
    return round(price * nbytes(node) * _UNIT)


def most(
    graph: fx.Graph,
    stages: Container[int],
    kept: set[fx.Node],
    peak: Callable[[set[fx.Node]], int],
    budget: int,
) -> set[fx.Node]:
    """Return the values to keep besides `kept`, so that little is computed again.

    The backward pass begins with the last operators: values that these would compute again at once
    can be kept at no cost. For the others prices are tried by bisection. Between the lowest price
    that fits and the next one, the choice for the later operators is that of the lower price.

    Args:
        peak: the bytes needed when some values are kept besides `kept`, at most `budget` for none.
    """
    own = [node for node in values(graph, stages) if node not in kept]
    least = peak(set())
    free = _latest(own, set(), set(own), lambda more: peak(more) <= least)
    kept = kept | free
    own = [node for node in own if node not in free]
    sizes = [nbytes(node) for node in own if nbytes(node)]
    if not sizes:
        return free

    def fits(more: set[fx.Node]) -> bool:
        return peak(free | more) <= budget

    low, high = 0.0, 2 * sum(map(seconds, own)) / min(sizes)
    less, more = set[fx.Node](), set(own)
    network = KeptValues(graph, stages, kept, high)
    for _ in range(_STEPS):
        price = high / 4 if low == 0.0 else (low * high) ** 0.5
        chosen = network.cheapest(price)
        if fits(chosen):
            high, less = price, chosen
        else:
            low, more = price, chosen
        if high < 1.02 * low:
            break
    return free | _latest(own, less, more, fits)


def _latest(
    own: list[fx.Node],
    less: set[fx.Node],
    more: set[fx.Node],
    fits: Callable[[set[fx.Node]], bool],
) -> set[fx.Node]:
    """`more` of the later ones of `own`, as many as fit, and `less` of the earlier ones."""

    def mixed(index: int) -> set[fx.Node]:
        return {*less.intersection(own[:index]), *more.intersection(own[index:])}

    first, last = 0, len(own)
    while first < last:
        index = (first + last) // 2
        if fits(mixed(index)):
            last = index
        else:
            first = index + 1
    return mixed(first)


def _of_forward(node: fx.Node, stages: Container[int]) -> bool:
    return node.op == "call_function" and not node.meta[BACKWARD] and node.meta.get(STAGE) in stages
