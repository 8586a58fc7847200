"""Train a student by its own moving average on several crops of an image, as DINO does."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch

OUT, MOMENTUM, CENTER = 6, 0.9, 0.8
STEPS, ROWS, ACCUMULATION = 4, 2, 3
EPSILON = 1e-4  # the gradient of a key's bias is nothing but rounding, which Adam would blow up


class Backbone(nn.Module):
    """A small encoder of patches, whose head has normalised weights."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 8) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                8, 2, 16, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 4)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, OUT, bias=False))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.last(F.normalize(self.head(x[:, 0]), dim=-1))


class Distiller(nn.Module):
    """Student, teacher, and the loss between their views of the crops.

    Args:
        in_forward: the teacher follows in `forward`; else the program does it between calls.
    """

    def __init__(self, student, *, in_forward):
        super().__init__()
        self.student, self.teacher = student, copy.deepcopy(student)
        for parameter in self.teacher.parameters():
            parameter.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, OUT))
        self.in_forward = in_forward

    @torch.no_grad()
    def follow(self):
        for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.mul_(MOMENTUM).add_(its.detach(), alpha=1 - MOMENTUM)

    def forward(self, large, small):
        crops = [*large.unbind(1), *small.unbind(1)]
        with torch.no_grad():
            teacher = self.teacher(torch.cat(crops[:2]))
            targets = F.softmax((teacher - self.center) / 0.04, dim=-1).chunk(2)
            self.center.mul_(CENTER).add_(teacher.mean(0, keepdim=True), alpha=1 - CENTER)
        scores = [self.student(torch.cat(crops[:2])), self.student(torch.cat(crops[2:]))]
        views = [view for part in scores for view in part.chunk(2)]
        terms = [
            torch.sum(-target * F.log_softmax(view / 0.1, dim=-1), dim=-1).mean()
            for first, target in enumerate(targets)
            for second, view in enumerate(views)
            if first != second
        ]
        loss = poptorch.identity_loss(torch.stack(terms).mean(), reduction="none")
        if self.in_forward:
            self.follow()
        return loss


def crops():
    rows = ROWS * ACCUMULATION
    return torch.randn(rows, 2, 3, 8, 8), torch.randn(rows, 2, 3, 4, 4)


def schedule(step):
    return 1e-3 * (1 + math.cos(math.pi * step / STEPS)), 0.04 + 0.1 * step / STEPS


def groups(model):
    parameters = [(n, p) for n, p in model.student.named_parameters() if p.requires_grad]
    flat = [p for n, p in parameters if n.endswith("bias") or p.dim() == 1]
    rest = [p for n, p in parameters if not (n.endswith("bias") or p.dim() == 1)]
    return [{"params": rest}, {"params": flat, "weight_decay": 0.0}]


def scheduled(optimizer, step):
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = schedule(step)[0]
        if number == 0:
            group["weight_decay"] = schedule(step)[1]
    return optimizer


def plain(model, batches):
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3, eps=EPSILON)
    losses = []
    for step, (large, small) in enumerate(batches):
        scheduled(optimizer, step).zero_grad()
        for part in range(ACCUMULATION):
            rows = slice(part * ROWS, (part + 1) * ROWS)
            loss = model(large[rows], small[rows])
            (loss / ACCUMULATION).backward()
        losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.student.parameters(), 1.5)
        assert norm > 0
        optimizer.step()
        if not model.in_forward:
            model.follow()
    return losses


def on_ipus(model, batches):
    options = poptorch.Options().showCompilationProgressBar(False)
    options.Training.gradientAccumulation(ACCUMULATION)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    optimizer = poptorch.optim.AdamW(
        groups(model), lr=1e-3, eps=EPSILON, weight_decay=0.04, max_grad_norm=1.5
    )
    training = poptorch.trainingModel(model, options, optimizer)
    losses = []
    for step, batch in enumerate(batches):
        training.setOptimizer(scheduled(optimizer, step))
        losses.append(training(*batch))
        if not model.in_forward:
            training.copyWeightsToHost()
            model.follow()
            training.copyWeightsToDevice()
    training.detachFromDevice()
    training.destroy()
    return losses


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("in_forward", [True, False])
def test_student_teacher_and_center_are_those_of_plain_pytorch(in_forward):
    torch.manual_seed(0)
    student = Backbone()
    batches = [crops() for _ in range(STEPS)]
    expected, model = (Distiller(copy.deepcopy(student), in_forward=in_forward) for _ in range(2))
    losses = plain(expected, batches)
    torch.testing.assert_close(on_ipus(model, batches), losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=2e-5)
    moved = model.teacher.state_dict()
    assert not torch.equal(moved["token"], student.token)


def test_an_evaluation_sees_the_teacher_of_now():
    torch.manual_seed(0)
    expected = Distiller(Backbone(), in_forward=True)
    model, pictures = copy.deepcopy(expected), torch.randn(2, 3, 8, 8)
    options = poptorch.Options()
    options.Training.gradientAccumulation(ACCUMULATION)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    optimizer = poptorch.optim.AdamW(
        groups(model), lr=1e-3, eps=EPSILON, weight_decay=0.04, max_grad_norm=1.5
    )
    training = poptorch.trainingModel(model, options, optimizer)
    evaluating = poptorch.inferenceModel(model.teacher)
    batches, seen = [crops() for _ in range(STEPS)], []
    for step, batch in enumerate(batches):
        training.setOptimizer(scheduled(optimizer, step))
        training(*batch)
        seen.append(evaluating(pictures))
    plain(expected, batches)
    torch.testing.assert_close(seen[-1], expected.teacher(pictures), rtol=1e-3, atol=1e-5)
    assert not torch.equal(seen[0], seen[-1])
