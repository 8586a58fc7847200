"""Check that training minimises the value that a loss of torch's has, whatever its reduction."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.softmax(torch.randn(6, 4, generator=torch.Generator().manual_seed(2)), 1)
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
LABELS = torch.tensor([0, 3, 1, 2, 2, 0])
REDUCTIONS = ("none", "mean", "sum")
LOSSES = {
    "l1": lambda h, r: F.l1_loss(h, Y, reduction=r),
    "mse": lambda h, r: F.mse_loss(h, Y, reduction=r),
    "mse with weights": lambda h, r: F.mse_loss(h, Y, reduction=r, weight=Y + 1),
    "cross entropy": lambda h, r: F.cross_entropy(h, LABELS, reduction=r),
    "cross entropy of probabilities": lambda h, r: F.cross_entropy(h, Y, reduction=r),
    "nll": lambda h, r: F.nll_loss(h, LABELS, reduction=r),
    "bce": lambda h, r: F.binary_cross_entropy(h.sigmoid(), Y, weight=Y, reduction=r),
    "bce with logits": lambda h, r: F.binary_cross_entropy_with_logits(h, Y, reduction=r),
    "kl": lambda h, r: F.kl_div(h.log_softmax(1), Y, reduction=r),
    "poisson": lambda h, r: F.poisson_nll_loss(h, Y, reduction=r),
    "hinge": lambda h, r: F.hinge_embedding_loss(h[:, 0], SIGNS, reduction=r),
    "smooth l1": lambda h, r: F.smooth_l1_loss(h, Y, reduction=r),
    "smooth l1 with beta 0": lambda h, r: F.smooth_l1_loss(h, Y, beta=0.0, reduction=r),
    "soft margin": lambda h, r: F.soft_margin_loss(h[:, 0], SIGNS, reduction=r),
    "cosine": lambda h, r: F.cosine_embedding_loss(h, Y, SIGNS, reduction=r),
    "ranking": lambda h, r: F.margin_ranking_loss(h[:, 0], Y[:, 0], SIGNS, reduction=r),
    "triplet": lambda h, r: F.triplet_margin_loss(h, Y, 1 - Y, reduction=r),
}
CASES = [(name, r) for name in LOSSES for r in REDUCTIONS] + [("kl", "batchmean")]


class Net(nn.Module):
    def __init__(self, name, reduction):
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(4, 4)
        self.loss = lambda h: LOSSES[name](h, reduction)

    def forward(self, x):
        return self.loss(self.l(x))


@pytest.mark.few(14)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("name", "reduction"), CASES)
def test_the_gradient_is_that_of_the_loss(name, reduction):
    net = Net(name, reduction)
    reference = copy.deepcopy(net)
    loss = reference(X)
    loss.sum().backward()
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    before = net.l.weight.detach().clone()
    result = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=1.0))(X)
    torch.testing.assert_close(result, loss.detach())
    torch.testing.assert_close(before - net.l.weight, reference.l.weight.grad)


class Untrained(nn.Module):
    """A loss that no parameter has a part in, over two stages."""

    def __init__(self, stages):
        super().__init__()
        self.unused, self.stages = nn.Linear(2, 2), stages

    def forward(self, x):
        with poptorch.Block("first", 0):
            y = x * 2
        with poptorch.Block("second", self.stages - 1):
            return y, poptorch.identity_loss(y.square(), "mean")


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("strategy", ["PipelinedExecution", "ShardedExecution"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_without_a_parameter_trains_nothing(stages, strategy, replicas):
    model = Untrained(stages)
    before = copy.deepcopy(model.state_dict())
    options = poptorch.Options().deviceIterations(2).replicationFactor(replicas)
    options.Training.gradientAccumulation(3)
    options.outputMode(poptorch.OutputMode.All)
    options.setExecutionStrategy(getattr(poptorch, strategy)(poptorch.AutoStage.AutoIncrement))
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, loss_scaling=4.0)
    executor = poptorch.trainingModel(model, options, optimizer)
    x = torch.randn(2 * 3 * replicas, 2)
    for _ in range(2):
        out, loss = executor(x)
        assert torch.equal(out, 2 * x)
        torch.testing.assert_close(loss, (2 * x).square().mean(1))
    executor.setOptimizer(
        poptorch.optim.AdamW(model.parameters(), lr=0.2, weight_decay=0.5, loss_scaling=4.0)
    )
    executor(x)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    optimizer.state_dict()
