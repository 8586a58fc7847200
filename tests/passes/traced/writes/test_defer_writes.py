"""Check that a variable is written once in a step, and read as it was before all through it."""

import copy

import pytest
import torch
from torch import nn

from ipu_dynamo import (
    Block,
    CompileError,
    Options,
    compile_inference,
    compile_training,
    custom_operator,
)

SHARE, ROWS = 0.75, 2


class Followed(nn.Module):
    """A layer whose weights another follows, on the first of two stages."""

    def __init__(self, stages):
        super().__init__()
        self.stages = stages
        self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.head, self.loss = nn.Linear(3, 2), nn.MSELoss()

    def forward(self, x, y, share):
        with Block("first", ipu_id=0):
            before = self.teacher(x)
            pairs = zip(self.student.parameters(), self.teacher.parameters(), strict=True)
            for weight, average in pairs:
                custom_operator([weight, average, share], "ExpMovAvg", "com.acme", 1)
            after = self.teacher(x)
            h = self.student(x)
        with Block("second", ipu_id=self.stages - 1):
            scores = self.head(h * after)
            return self.loss(scores, y), before, after


def step(model, optimizer, batches, parts):
    """A step of a plain loop; the losses, and what the teacher says of all micro-batches."""
    optimizer.zero_grad()
    losses, said = [], []
    for x, y in batches:
        said.append(model.teacher(x))
        losses.append(model.loss(model.head(model.student(x) * said[-1]), y))
        (losses[-1] / parts).backward()
    pairs = list(zip(model.student.parameters(), model.teacher.parameters(), strict=True))
    with torch.no_grad():
        for weight, average in pairs:
            average.copy_(SHARE * average + (1 - SHARE) * weight)
    optimizer.step()
    return losses, said


@pytest.mark.parametrize(
    ("stages", "accumulation", "iterations", "replicas"),
    [(1, 1, 2, 1), (1, 3, 1, 2), (2, 4, 2, 1), (2, 3, 1, 2)],
)
def test_the_average_moves_behind_the_last_micro_batch(stages, accumulation, iterations, replicas):
    torch.manual_seed(0)
    model = Followed(stages).double()
    plain = copy.deepcopy(model)
    run = compile_training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        Options(
            engine="eager",
            gradient_accumulation=accumulation,
            device_iterations=iterations,
            replicas=replicas,
            output_mode="all",
        ),
    )
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    parts = accumulation * replicas
    for _ in range(2):
        x, y = torch.randn(2, iterations * parts * ROWS, 3, dtype=torch.float64)
        y = y[:, :2]
        loss, before, after = run(x, y, torch.full((iterations * parts,), SHARE))
        losses, said = [], []
        steps = zip(x.chunk(iterations), y.chunk(iterations), strict=True)
        for xs, ys in steps:
            batches = zip(xs.chunk(parts), ys.chunk(parts), strict=True)
            one = step(plain, optimizer, batches, parts)
            losses += one[0]
            said += one[1]
        torch.testing.assert_close(loss.reshape(-1), torch.stack(losses).detach())
        torch.testing.assert_close(before, torch.cat(said))
        torch.testing.assert_close(after, torch.cat(said))
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


def test_inference_writes_at_every_call():
    average = nn.Module()
    average.register_buffer("value", torch.zeros(2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.average = average

        def forward(self, x, share):
            custom_operator([x[0], self.average.value, share], "ExpMovAvg", "com.acme", 1)
            return self.average.value + 0

    run = compile_inference(Model(), Options(engine="eager"))
    x, half = torch.ones(1, 2), torch.tensor([0.5])
    assert [run(x, half).tolist() for _ in range(3)] == [[0, 0], [0.5, 0.5], [0.75, 0.75]]


class Changing(nn.Module):
    """A teacher that `case` uses after it was told to follow."""

    def __init__(self, case):
        super().__init__()
        self.case, self.layer = case, nn.Linear(2, 2)
        self.register_buffer("value", torch.zeros(2))

    def forward(self, x):
        custom_operator([x[0], self.value, torch.tensor(0.0)], "ExpMovAvg", "com.acme", 1)
        return nn.functional.mse_loss(self.layer(x), x), self.case(self.value)


@pytest.mark.parametrize(
    "case", [lambda v: v, lambda v: v.view(1, 2), lambda v: v.unsqueeze(0).expand(3, 2)]
)
def test_what_is_returned_of_it_is_what_it_was(case):
    model = Changing(case)
    options = Options(engine="eager", gradient_accumulation=2, output_mode="all")
    run = compile_training(model, torch.optim.SGD(model.layer.parameters(), lr=0.1), options)
    x = torch.arange(4.0).view(2, 2)
    assert not run(x)[1].any()
    again = run(x)[1].reshape(-1, 2)
    assert torch.equal(again, torch.tensor([2.0, 3.0]).expand_as(again))


def test_later_changes_of_it_last_until_it_is_written():
    model = Changing(lambda value: value.add_(1) * 1)
    options = Options(engine="eager", gradient_accumulation=3, output_mode="all")
    run = compile_training(model, torch.optim.SGD(model.layer.parameters(), lr=0.1), options)
    x = torch.arange(6.0).view(3, 2)
    assert run(x)[1].reshape(3, 2).tolist() == [[1, 1], [2, 2], [3, 3]]
    assert model.value.tolist() == [4, 5]


def test_a_value_of_another_shape_is_refused_with_its_line():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("value", torch.zeros(2))

        def forward(self, x):
            custom_operator([x, self.value, torch.tensor(0.0)], "ExpMovAvg", "com.acme", 1)
            return x + 1

    with pytest.raises(CompileError, match=r"shape \[2\] cannot follow.*\[3, 2\]"):
        compile_inference(Wrong(), Options(engine="eager"))(torch.ones(3, 2))
