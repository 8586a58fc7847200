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
