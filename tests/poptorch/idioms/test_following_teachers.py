"""Train a student whom a teacher follows, on two IPUs, with weights that a hook computes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch

ACCUMULATION, SHARE, RATE = 11, 0.75, 0.1
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')


class Normed(nn.Linear):
    """A layer whose weight is made before its call: before a block that begins with the call."""

    def __init__(self):
        super().__init__(4, 3, bias=False)
        self.direction, self.size = self.weight, nn.Parameter(torch.full((3, 1), 2.0))
        del self.weight
        self.register_forward_pre_hook(Normed._make_weight)

    @staticmethod
    def _make_weight(layer, _):
        layer.weight = F.normalize(layer.direction, dim=1) * layer.size


class Model(nn.Module):
    """A student and its teacher, whose last layers are in a block of the second IPU."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.ModuleDict({"first": nn.Linear(4, 4), "last": Normed()})
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        for parameter in self.teacher.parameters():
            parameter.data += 0.1

    def say(self, who, x):
        return who["last"](torch.tanh(who["first"](x)))

    def forward(self, x, share):
        student = self.say(self.student, x)
        with torch.no_grad():
            for ipu, name in enumerate(("first", "last")):
                layers = (part[name].parameters() for part in (self.student, self.teacher))
                for weight, average in zip(*layers, strict=True):
                    with poptorch.Block(f"ipu{ipu}", ipu):
                        poptorch.custom_op(
                            [weight, average, share], "ExpMovAvg", "com.acme", 1, [weight]
                        )
            teacher = self.say(self.teacher, x)
        return poptorch.identity_loss((student - teacher).square().mean(), "none")


def test_a_teacher_follows_whatever_computes_its_weights():
    model = Model()
    plain = copy.deepcopy(model).double()
    for part in (model.student, model.teacher):
        poptorch.BeginBlock(part["first"], "ipu0", ipu_id=0)
        poptorch.BeginBlock(part["last"], "ipu1", ipu_id=1)
    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu))
    options.Training.gradientAccumulation(ACCUMULATION)
    options.outputMode(poptorch.OutputMode.All)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=RATE)
    executor = poptorch.trainingModel(model, options, optimizer)
    update = torch.optim.SGD(plain.student.parameters(), lr=RATE)
    for _ in range(2):
        x = torch.randn(ACCUMULATION * 2, 4)
        found = executor(x, torch.full((ACCUMULATION,), SHARE))
        losses = [
            (plain.say(plain.student, part) - plain.say(plain.teacher, part)).square().mean()
            for part in x.double().chunk(ACCUMULATION)
        ]
        update.zero_grad()
        (sum(losses) / ACCUMULATION).backward()
        pairs = zip(plain.student.parameters(), plain.teacher.parameters(), strict=True)
        with torch.no_grad():
            for weight, average in pairs:
                average.copy_(SHARE * average + (1 - SHARE) * weight)
        update.step()
        torch.testing.assert_close(found.double(), torch.stack(losses).detach(), **CLOSE)
    expected = plain.state_dict()
    for name, tensor in executor.state_dict().items():
        torch.testing.assert_close(tensor.double(), expected[name], **CLOSE)
