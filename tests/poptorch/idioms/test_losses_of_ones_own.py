"""Train two towers by a loss of one's own, on two IPUs, as programs with contrastive losses do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch

STEPS, ROWS, ACCUMULATION = 4, 4, 5


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 8), nn.Linear(8, 4)

    def forward(self, x):
        return F.normalize(self.second(F.gelu(self.first(x))), dim=-1)


class Contrast(nn.Module):
    """Texts and pictures that belong together, and a loss with three terms.

    Args:
        reduction: of `identity_loss`.
    """

    def __init__(self, reduction):
        super().__init__()
        self.pictures, self.texts = Tower(6), Tower(5)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.reduction = reduction

    def forward(self, pictures, texts, weights):
        with poptorch.Block("pictures", ipu_id=0):
            a = self.pictures(pictures)
        with poptorch.Block("texts", ipu_id=1):
            b = self.texts(texts)
            scores = self.scale.exp() * a @ b.t()
            right = torch.arange(len(scores))
            rows = F.cross_entropy(scores, right, reduction="none")
            columns = F.cross_entropy(scores.t(), right, reduction="none")
            uniform = torch.pdist(a).pow(2).mul(-2).exp().mean().log()
            terms = weights * (rows + columns) / 2 + 0.1 * uniform
            loss = poptorch.identity_loss(terms, reduction=self.reduction)
            accuracy = (scores.argmax(-1) == right).float().mean()
            return loss, scores, accuracy


def batches():
    drawn = torch.Generator().manual_seed(2)
    rows = ROWS * ACCUMULATION
    return [
        (
            torch.randn(rows, 6, generator=drawn),
            torch.randn(rows, 5, generator=drawn),
            torch.rand(rows, generator=drawn),
        )
        for _ in range(STEPS)
    ]


def plain(model, *, mean):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2, eps=1e-4, momentum=0.5)
    results = []
    for batch in batches():
        optimizer.zero_grad()
        for index in range(ACCUMULATION):
            loss, scores, accuracy = model(*(x[index * ROWS : (index + 1) * ROWS] for x in batch))
            total = loss.mean() if model.reduction == "none" else loss
            (total / ACCUMULATION if mean else total).backward()
            results.append((loss.detach(), scores.detach(), accuracy))
        optimizer.step()
    return results


@pytest.mark.few(2)
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_and_its_results_are_those_of_a_plain_loop(reduction, mean):
    torch.manual_seed(1)
    expected = Contrast(reduction)
    model = copy.deepcopy(expected)
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(ACCUMULATION)
    kind = poptorch.ReductionType.Mean if mean else poptorch.ReductionType.Sum
    options.Training.accumulationAndReplicationReductionType(kind)
    optimizer = poptorch.optim.RMSprop(model.parameters(), lr=1e-2, eps=1e-4, momentum=0.5)
    training = poptorch.trainingModel(model, options, optimizer)
    results = [training(*batch) for batch in batches()]
    training.copyWeightsToHost()
    losses, scores, right = zip(*plain(expected, mean=mean), strict=True)
    every = [torch.cat(parts) for parts in zip(*results, strict=True)]
    plainly = [torch.stack(losses), torch.cat(scores), torch.stack(right)]
    torch.testing.assert_close(every, plainly, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=2e-5)


def test_a_loss_that_is_not_reduced_is_refused():
    executor = poptorch.trainingModel(Contrast("none"))
    with pytest.raises(poptorch.Error):
        executor(*(x[:ROWS] for x in batches()[0]))
