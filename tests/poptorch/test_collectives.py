"""Check PopTorch's custom operators by which replicas exchange tensors."""

import pytest
import torch
from torch import nn

import poptorch

REPLICAS = 4
X = torch.arange(24.0).reshape(8, 3) / 10  # two rows for each replica
ALL = list(range(REPLICAS))


def custom(x, name, example=None, **attributes):
    example = x if example is None else example
    return poptorch.custom_op(
        [x], name, "ai.graphcore", 1, example_outputs=[example], attributes=attributes
    )[0]


def options(replicas=REPLICAS):
    made = poptorch.Options()
    made.replicationFactor(replicas).outputMode(poptorch.OutputMode.All)
    made.showCompilationProgressBar(False)
    return made


class Forward(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, x):
        return self.compute(x)


def run(compute, x=X, replicas=REPLICAS):
    """The result of each replica."""
    result = poptorch.inferenceModel(Forward(compute), options(replicas))(x)
    return result.view(replicas, -1, *result.shape[1:])


def parts(x=X):
    return x.view(REPLICAS, -1, *x.shape[1:])


def gather(x):
    example = torch.zeros(REPLICAS * x.shape[0], *x.shape[1:], dtype=x.dtype)
    return custom(x, "ReplicatedAllGather", example)


def total(x, backwards=0, grouping=(REPLICAS, 1, REPLICAS)):
    grouping = {"__collectiveReplicaGrouping": list(grouping)}
    return custom(x, "ReplicatedAllReduceTP", op="sum", backwards=backwards, **grouping)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.bool])
def test_a_gather_has_the_tensors_of_all_replicas_in_the_shape_of_its_example(dtype):
    x = (X > 1.1) if dtype == torch.bool else (X * 10).to(dtype)
    for result in run(gather, x):
        assert torch.equal(result, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_a_sum_is_that_of_all_replicas_in_their_order(dtype):
    x = (X * 10).to(dtype)
    a, b, c, d = parts(x)
    for result in run(total, x):
        assert torch.equal(result, (a + b) + (c + d))


@pytest.mark.parametrize(("stride", "groups"), [(1, [(0, 1), (2, 3)]), (2, [(0, 2), (1, 3)])])
def test_replicas_of_a_group_exchange_with_each_other(stride, groups):
    results = run(lambda x: total(x, grouping=(REPLICAS, stride, 2)))
    for first, second in groups:
        for replica in (first, second):
            assert torch.equal(results[replica], parts()[first] + parts()[second])


def test_an_exchange_gives_each_replica_its_part_of_all():
    x = torch.arange(32.0).view(16, 2)  # four rows for each replica
    results = run(lambda x: custom(x, "ReplicatedAllToAll"), x)
    for replica in ALL:
        assert torch.equal(results[replica], parts(x)[:, replica])


class Trained(nn.Module):
    """A loss of each replica of its own, behind an exchange."""

    def __init__(self, exchange):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.exchange = exchange

    def forward(self, x, factors):
        h = self.exchange(x * self.weight)
        return poptorch.identity_loss((h * factors).sum(), "sum")


def gradient(exchange, factors):
    """The gradient of the weights, of a mean over replicas."""
    model = Trained(exchange)
    train_options = poptorch.Options().replicationFactor(REPLICAS)
    train_options.showCompilationProgressBar(False)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    poptorch.trainingModel(model, train_options, optimizer)(X, factors)
    return 1 - model.weight.detach()


FACTORS = torch.linspace(-1, 1, 24).view(8, 3)
WIDE = torch.linspace(-1, 1, 96).view(32, 3)  # for what is gathered


def test_the_gradient_of_a_gather_is_the_own_slice():
    own = torch.stack([part[2 * r : 2 * r + 2] for r, part in enumerate(WIDE.view(4, 8, 3))])
    torch.testing.assert_close(gradient(gather, WIDE), (parts() * own).sum((0, 1)) / 4)


def test_a_gather_and_a_sum_of_gradients_is_differentiated_over_all_replicas():
    of_all = WIDE.view(4, 4, 2, 3).sum(0)
    found = gradient(lambda x: total(gather(x), backwards=1), WIDE)
    torch.testing.assert_close(found, (parts() * of_all).sum((0, 1)) / 4)


def test_the_gradient_of_a_sum_passes_unchanged():
    torch.testing.assert_close(gradient(total, FACTORS), (X * FACTORS).sum(0) / 4)


def test_a_sum_backwards_sums_gradients_alone():
    found = gradient(lambda x: total(x, backwards=1), FACTORS)
    of_all = parts(FACTORS).sum(0)
    torch.testing.assert_close(found, (parts() * of_all).sum((0, 1)) / 4)
    assert torch.equal(run(lambda x: total(x, backwards=1)), parts())


def test_the_gradient_of_an_exchange_is_the_exchange_of_gradients():
    def exchange(x):
        return custom(x.repeat(2, 1), "ReplicatedAllToAll")

    factors = torch.linspace(-1, 1, 48).view(16, 3)
    back = factors.view(4, 4, 3).transpose(0, 1)  # part s of replica r goes to replica s
    own = back.reshape(4, 2, 2, 3).sum(1)
    torch.testing.assert_close(gradient(exchange, factors), (parts() * own).sum((0, 1)) / 4)


def test_one_replica_exchanges_nothing():
    x = X[:2]
    one = {"grouping": (1, 1, 1)}
    assert torch.equal(run(lambda x: total(x, **one), x, 1)[0], x)
    assert torch.equal(run(lambda x: custom(x, "ReplicatedAllGather"), x, 1)[0], x)
    assert torch.equal(run(lambda x: custom(x, "ReplicatedAllToAll"), x, 1)[0], x)


def in_a_loop(x):
    return poptorch.for_loop(2, lambda y: [total(y)], [x])[0]


REFUSED = [
    (lambda x: total(x, grouping=(2, 1, 2)), "between 2 replicas, and the program has 4"),
    (lambda x: total(x, grouping=(4, 3, 2)), "groups of 2 of 4 replicas with stride 3"),
    (lambda x: custom(x, "ReplicatedAllReduceTP", op="mean"), "op='mean'"),
    (lambda x: custom(x, "ReplicatedAllReduceTP", backwards=2), "backwards=2"),
    (lambda x: custom(x, "ReplicatedAllGather", size=2), "no attribute 'size'"),
    (lambda x: custom(x, "ReplicatedAllGather", torch.zeros(5)), "example_outputs has shape"),
    (lambda x: custom(x, "ReplicatedAllToAll"), "cannot be divided between 4 replicas"),
    (lambda x: total(x > 1), "cannot sum truth values"),
    (in_a_loop, "the body of a loop or branch exchanges tensors"),
]


@pytest.mark.parametrize(("compute", "message"), REFUSED)
def test_what_cannot_be_exchanged_is_refused_with_its_line(compute, message):
    with pytest.raises(poptorch.Error, match=message) as error:
        run(compute)
    assert "test_collectives.py" in str(error.value)
    assert error.value.id == "collective"


def test_outside_of_a_program_the_results_are_zero():
    assert torch.equal(total(X), torch.zeros_like(X))
