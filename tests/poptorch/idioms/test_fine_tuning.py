"""Train the head of a frozen network, then all of it, and evaluate on batches of other sizes."""

import copy

import torch
from torch import nn

import poptorch

STEPS, ROWS = 3, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x, y=None):
        scores = self.head(self.backbone(x).flatten(1))
        if y is None:
            return {"scores": scores, "best": scores.topk(2).indices}
        loss = nn.functional.cross_entropy(scores, y)
        with torch.no_grad():
            right = (scores.argmax(-1) == y).sum()
        return loss, right


def batches(seed):
    drawn = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(ROWS, 1, 6, 6, generator=drawn), torch.randint(3, (ROWS,), generator=drawn))
        for _ in range(STEPS)
    ]


def phases(model):
    """What each phase trains, and its mode."""
    for parameter in model.backbone.parameters():
        parameter.requires_grad_(False)
    model.train()
    model.backbone.eval()
    yield [p for p in model.parameters() if p.requires_grad], 0.1
    model.requires_grad_(True).train()
    yield (
        [
            {"params": model.backbone.parameters(), "lr": 0.01},
            {"params": model.head.parameters()},
        ],
        0.1,
    )


def plain(model):
    results = []
    for seed, (parameters, rate) in enumerate(phases(model)):
        optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        for batch in batches(seed):
            optimizer.zero_grad()
            loss, right = model(*batch)
            loss.backward()
            optimizer.step()
            results.append((loss.detach(), right))
    return results


def on_ipus(model):
    results = []
    for seed, (parameters, rate) in enumerate(phases(model)):
        optimizer = poptorch.optim.SGD(parameters, lr=rate, momentum=0.9)
        training = poptorch.trainingModel(model, optimizer=optimizer)
        results += [training(*batch) for batch in batches(seed)]
        training.detachFromDevice()
        training.destroy()
    return results


def test_both_phases_and_the_evaluation_are_those_of_plain_pytorch():
    torch.manual_seed(0)
    expected = Net()
    model = copy.deepcopy(expected)
    results = plain(expected)
    for (loss, right), (its, count) in zip(on_ipus(model), results, strict=True):
        torch.testing.assert_close(loss, its, rtol=1e-4, atol=1e-5)
        assert right == count
        assert right.dtype == torch.int32
    expected.eval()
    model.eval()
    weights, theirs = model.state_dict(), expected.state_dict()
    for state in (weights, theirs):
        del state["backbone.1.num_batches_tracked"]
    torch.testing.assert_close(weights, theirs, rtol=1e-4, atol=1e-5)
    for rows in (8, 3):  # an epoch, and its last batch: an executor for each
        evaluating = poptorch.inferenceModel(model)
        x = torch.randn(rows, 1, 6, 6)
        ours, plainly = evaluating(x), expected(x)
        assert list(ours) == ["scores", "best"]
        torch.testing.assert_close(ours["scores"], plainly["scores"], rtol=1e-4, atol=1e-5)
        assert torch.equal(ours["best"].long(), plainly["best"])
        evaluating.destroy()
