"""Check that the choice of what to keep is the cheapest of all."""

from itertools import combinations

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import Options
from ipu_dynamo.ops.graph_queries import nbytes, owner
from ipu_dynamo.ops.operator_costs import seconds
from ipu_dynamo.passes.graph.liveness import peak_bytes
from ipu_dynamo.passes.joint.recomputation.minimum_cut import KeptValues, most, values
from ipu_dynamo.passes.joint.recomputation.recompute import plan
from tests.properties.evaluate import captured

STAGES = range(1)
PRICES = [1e-11, 2.1e-10, 3e-10, 5e-10, 1e-9, 3e-9, 1e-6]


class Small(nn.Module):
    """A product, cheap operators on what it makes, and one value that is read far apart."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        h = torch.tanh(self.wide(x))
        return ipu_dynamo.identity_loss((self.narrow(h.sin()).exp() * x).sin(), "sum")


@pytest.fixture(scope="module")
def capture():
    return captured(Small(), (torch.ones(32, 8),), Options(), before="Recompute")[0]


def cost(graph, kept, price):
    again = {owner(node) for nodes in plan(graph, STAGES, kept).values() for node in nodes}
    again -= {node for node in again if node.op == "placeholder"}  # what views are of
    return price * sum(map(nbytes, kept)) + sum(map(seconds, again))


def cheapest(graph, price):
    return KeptValues(graph, STAGES, set(), price).cheapest(price)


@pytest.mark.parametrize("price", PRICES)
def test_nothing_is_cheaper(capture, price):
    graph = capture.graph.graph
    own = values(graph, STAGES)
    assert len(own) < 10
    sets = [set(kept) for n in range(len(own) + 1) for kept in combinations(own, n)]
    found = cheapest(graph, price)
    assert cost(graph, found, price) == pytest.approx(min(cost(graph, s, price) for s in sets))


def test_prices_decide(capture):
    graph = capture.graph.graph
    kept = [sum(map(nbytes, cheapest(graph, price))) for price in (1e-12, 3e-10, 1e-3)]
    assert kept[0] > kept[1] > kept[2] == 0


def test_one_network_serves_all_prices_in_any_order(capture):
    graph = capture.graph.graph
    network = KeptValues(graph, STAGES, set(), max(PRICES))
    for price in (*PRICES[::-1], *PRICES[::2]):
        assert network.cheapest(price) == cheapest(graph, price)


class Deep(nn.Module):
    """What is wide is needed again long after it was made."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Small() for _ in range(4))

    def forward(self, x):
        for part in self.parts:
            x = part.narrow(torch.tanh(part.wide(x)).sin()).exp() * x
        return ipu_dynamo.identity_loss(x.sin(), "sum")


def test_what_fits_is_kept():
    capture = captured(Deep(), (torch.ones(32, 8),), Options(), before="Recompute")[0]
    graph = capture.graph.graph
    own = values(graph, STAGES)
    between = {node for node in own if node.target is torch.ops.aten.mul.Tensor}

    def peak(kept):
        return peak_bytes(capture, plan(graph, STAGES, between | kept))

    least, greatest = peak(set()), peak_bytes(capture)
    step = (greatest - least) // 5
    found = [most(graph, STAGES, between, peak, least + i * step) for i in range(6)]
    assert all(peak(kept) <= least + i * step for i, kept in enumerate(found))
    costs = [cost(graph, between | kept, 0) for kept in found]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]
    assert cost(graph, between | most(graph, STAGES, between, peak, greatest), 0) == 0
