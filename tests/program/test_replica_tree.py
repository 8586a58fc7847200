"""Check the order in which values are summed over replicas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo import Options, compile_training, identity_loss
from ipu_dynamo.program.replica_tree import additions, subtrees


def written(count: int) -> str:
    """The sum as text."""
    sums = [str(place) for place in range(count)]
    for total, term in additions(count):
        sums[total] = f"({sums[total]} + {sums[term]})"
    return sums[0]


@pytest.mark.parametrize(
    ("count", "tree"),
    [
        (1, "0"),
        (3, "((0 + 1) + 2)"),
        (4, "((0 + 1) + (2 + 3))"),
        (6, "(((0 + 1) + (2 + 3)) + (4 + 5))"),
        (7, "(((0 + 1) + (2 + 3)) + ((4 + 5) + 6))"),
    ],
)
def test_the_tree_splits_at_the_largest_power_of_two(count, tree):
    assert written(count) == tree


@given(st.integers(0, 3), st.integers(1, 8), st.integers(0, 7))
def test_a_block_of_a_power_of_two_is_a_subtree(log, blocks, rest):
    """So replicas on several processes are summed by process first."""
    width, count = 1 << log, (1 << log) * blocks + rest
    inside = [(s, t) for s, t in additions(count) if s // width == t // width]
    for block in range(blocks):
        own = [(s - block * width, t - block * width) for s, t in inside if s // width == block]
        assert own == list(additions(width))


@pytest.mark.parametrize(
    ("count", "block", "parts"),
    [
        (4, range(2, 4), [range(2, 4)]),
        (6, range(3), [range(2), range(2, 3)]),
        (6, range(3, 6), [range(3, 4), range(4, 6)]),
        (10, range(5, 10), [range(5, 6), range(6, 8), range(8, 10)]),
        (5, range(5), [range(5)]),
    ],
)
def test_a_block_is_cut_into_its_largest_subtrees(count, block, parts):
    assert subtrees(count, block) == parts


def test_gradients_of_replicas_are_summed_along_the_tree():
    """In float32 these four have another sum in each order."""
    terms = torch.tensor([1.0, 1e8, -1e8, 3.0])
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    step = compile_training(
        Scaled(model),
        torch.optim.SGD(model.parameters(), lr=1.0),
        Options("eager", replicas=4, reduction="sum"),
    )
    step(terms.view(4, 1))
    step.read_weights()
    assert -model.weight.item() == ((terms[0] + terms[1]) + (terms[2] + terms[3])).item()
    assert -model.weight.item() != (((terms[0] + terms[1]) + terms[2]) + terms[3]).item()


class Scaled(torch.nn.Module):
    """Its gradient is the sum of its inputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return identity_loss(self.layer(x), "sum")
