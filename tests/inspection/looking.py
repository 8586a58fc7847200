"""Models to look at, and a check that looking changes nothing."""

from contextlib import contextmanager

import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import BeginBlock, Options, Strategy, compile_training, inspect
from ipu_dynamo.runtime.engines import engines

EAGER = {"engine": "eager"}


class Chain(nn.Module):
    """Three layers on an IPU each; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for ipu, layer in enumerate(self.layers):
            BeginBlock(layer, ipu_id=ipu)

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return nn.functional.mse_loss(h, x)


def pipeline(**options):
    """A training step of a pipeline, not compiled."""
    torch.manual_seed(0)
    model = Chain()
    common = {"gradient_accumulation": 6, "strategy": Strategy(kind="pipelined"), **EAGER}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return compile_training(model, optimizer, Options(**{**common, **options}))


def state_of(*modules):
    """Weights, generators, programs and process state that looking must leave alone."""
    weights = [t.clone() for module in modules for t in module.state_dict().values()]
    return weights, (
        torch.get_rng_state().tolist(),
        [id(program) for program in ipu_dynamo.programs()],
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        dict(torch._dynamo.utils.counters["frames"]),
    )


@contextmanager
def nothing_changes(monkeypatch, *modules):
    """Fail if the block compiles, runs or draws anything, or changes the modules."""

    def refuse(*_, **__):
        raise AssertionError("looking compiles")

    before_weights, before = state_of(*modules)
    with monkeypatch.context() as patch:
        patch.setattr(engines.EagerEngine, "compile", refuse)
        yield
    after_weights, after = state_of(*modules)
    assert after == before
    assert all(map(torch.equal, after_weights, before_weights))


MEMBERS = ("title", "programs", "program", "cut", "reasons", "passes", "settings", "times")
OF_PROGRAM = ("text", "schedule", "stash", "host", "cut", "title")
OF_HOST = ("program", "plan", "decisions", "schedule", "timeline", "memory")


def check_members(x):
    """Each member is there, or None with a reason; returns the inspection."""
    seen = inspect(x)
    for member in MEMBERS:
        assert getattr(seen, member) is not None or seen.why_absent(member), member
    for entry in seen.programs:
        for member in OF_PROGRAM:
            assert getattr(entry, member) is not None or entry.absent[member], member
        for member in OF_HOST if entry.host is not None else ():
            assert getattr(entry.host, member) is not None or entry.host.absent[member], member
    assert "\n" not in repr(seen)
    assert seen._repr_html_().count("<svg") == (seen.program is not None)
    return seen
