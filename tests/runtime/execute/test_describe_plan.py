"""Check that an executable says how it runs its program, and why so."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_dynamo import BeginBlock, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.tune.intra_op import intra_op_threads


class Net(nn.Module):
    def __init__(self, ipus):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        BeginBlock(self.a, ipu_id=0)
        BeginBlock(self.b, ipu_id=ipus - 1)

    def forward(self, x):
        return F.mse_loss(self.b(torch.tanh(self.norm(self.a(x)))), x[:, :2])


def host_program(ipus=1, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = Net(ipus)
    update = optimizer(model.parameters(), lr=0.1)
    step = compile_training(model, update, Options("eager", **options))
    step.compile(torch.randn(12, 3))
    return step.executable.host_program


def printed(*args, **options):
    return str(host_program(*args, **options))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({}, "functions run operator by operator"),
        ({"ipus": 2}, "2 IPUs"),
        ({"replicas": 2}, "2 replicas"),
        ({"gradient_accumulation": 3}, "3 micro-batches a step, 1 call each"),
        ({"optimizer": torch.optim.RMSprop}, "the rule rmsprop"),
    ],
)
def test_the_reason_is_given_why_a_step_is_not_fused(case, why):
    assert f"  FuseStep: not fused: {why}" in printed(**case)


def test_a_fused_step_shows_its_commit():
    text = printed(force={"FuseStep": True})
    assert "  FuseStep: fused: it is forced" in text
    assert "call whole_step0(" in text
    assert "which is the commit" in text


def test_what_is_written_forgotten_committed_and_put_back_is_shown():
    host = host_program(2, gradient_accumulation=4, strategy=Strategy("pipelined"))
    lines = str(host).splitlines()
    registers = {name: number for number, of in enumerate(host.plan.registers) for name in of}
    mean = registers["norm.running_mean"]
    (forward,) = (line for line in lines if "call! forward0" in line)
    assert f"!r{mean}" in forward
    (step,) = (line for line in lines if "call! step1" in line)
    assert "; free r" in step
    commit = lines.index("  commit, signals held:")
    assert lines[commit + 1].startswith("    update group 0 sgd")
    (undone,) = (line for line in lines if "roll-back" in line)
    rest = "\n".join(lines[lines.index(undone) :])
    assert "clear a.weight..grad" in rest
    assert "put back norm.running_mean" in " ".join(rest.split())


def test_workers_are_the_last_section_and_change_nothing_before_it():
    options = {"gradient_accumulation": 4, "strategy": Strategy("pipelined")}
    with intra_op_threads(2):
        one, two = (printed(2, **options, workers=workers) for workers in (1, 2))
    assert one.partition("  workers:")[0] == two.partition("  workers:")[0]
    assert one != two


@pytest.mark.inductor
def test_a_recipe_has_a_key_and_what_was_chosen_for_it():
    run = compile_inference(lambda x: torch.softmax(x, 1) * 2, Options("inductor"))
    run.compile(torch.randn(2, 3))
    (recipe,) = run.executable.host_program.plan.recipes
    assert str(recipe) == f"forward0: inductor; key {recipe.key[:8]}"
