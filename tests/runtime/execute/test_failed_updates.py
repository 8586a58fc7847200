"""Check what holds after an error in an update: nothing has changed, or every call says so."""

import pytest
import torch
from torch import nn

from ipu_dynamo import Options
from ipu_dynamo.errors import UpdateError
from ipu_dynamo.ops.updates.update_kernels import AdamKernel, SGDKernel
from ipu_dynamo.runtime.update.parameter_update import ParameterUpdate
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.optimizer.optimizer_checkpoints import follow_checkpoints

PARTIAL = "an update failed, and may have written a part of %a.weight"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.b(torch.tanh(self.norm(self.a(x)))), y)


def training(kind=torch.optim.AdamW, own_weights=False, **options):
    torch.manual_seed(0)
    net = Net()
    groups = [{"params": net.a.parameters()}, {"params": net.b.parameters(), "lr": 0.2}]
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(groups, lr=0.1, **extra)
    chosen = Options(engine="eager", gradient_accumulation=2, **options)
    step = CompiledModel(net, chosen, optimizer=optimizer, own_weights=own_weights)
    step.newest_state = follow_checkpoints(step, optimizer)
    return net, optimizer, step


def batch(seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=random), torch.randint(2, (8,), generator=random)


def everything(net, optimizer):
    """Copies of weights, buffers and the optimiser's state."""
    states = [v for of in optimizer.state_dict()["state"].values() for v in of.values()]
    return [torch.as_tensor(v).clone() for v in (*net.state_dict().values(), *states)]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def failing(monkeypatch):
    """Let the second update of a step fail, in a method of a class."""

    def arm(kind, method):
        real, calls = getattr(kind, method), [0]

        def fail(self, *args, **kwargs):
            calls[0] += 1
            if calls[0] == 2:
                real(self, *args, **kwargs)  # it has done its work, or a part of it
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return real(self, *args, **kwargs)

        monkeypatch.setattr(kind, method, fail)
        return lambda: monkeypatch.setattr(kind, method, real)

    return arm


@pytest.mark.parametrize(
    ("kind", "update"), [(torch.optim.AdamW, AdamKernel), (torch.optim.SGD, SGDKernel)]
)
def test_a_guarded_update_that_fails_is_undone(kind, update, failing):
    """Of SGD this is the first step, which begins the momentum."""
    net, optimizer, step = training(kind, guard_updates=True)
    other, their_optimizer, unharmed = training(kind)
    step.compile(*batch())
    before = [value.clone() for value in net.state_dict().values()]
    mend = failing(update, "__call__")
    with pytest.raises(UpdateError, match=r"its step is undone.*can't allocate memory") as caught:
        step(*batch())
    assert isinstance(caught.value.__cause__, RuntimeError)
    mend()
    assert same(net.state_dict().values(), before)
    for seed in range(3):
        assert torch.equal(step(*batch(seed)), unharmed(*batch(seed)))
    assert same(everything(net, optimizer), everything(other, their_optimizer))


def test_an_error_before_the_first_write_changes_nothing(failing):
    net, optimizer, step = training()
    other, their_optimizer, unharmed = training()
    step(*batch()), unharmed(*batch())
    before = everything(net, optimizer)
    mend = failing(ParameterUpdate, "prepare")
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        step(*batch(1))
    mend()
    assert same(everything(net, optimizer), before)
    assert torch.equal(step(*batch(1)), unharmed(*batch(1)))
    assert same(everything(net, optimizer), everything(other, their_optimizer))


def test_after_an_error_within_an_update_every_call_says_so(failing):
    _, optimizer, step = training()
    step(*batch())
    mend = failing(AdamKernel, "__call__")
    texts = []
    for _ in range(3):
        with pytest.raises(UpdateError, match=PARTIAL) as caught:
            step(*batch(1))
        texts.append(str(caught.value))
        mend()
    assert texts[0] == texts[1] == texts[2]
    assert "Options(guard_updates=True)" in texts[0]
    for read in (step.read_weights, step.read_optimizer_state, optimizer.state_dict):
        with pytest.raises(UpdateError, match=PARTIAL):
            read()  # what it would read is of no step


@pytest.mark.parametrize("own_weights", [False, True])
def test_a_checkpoint_makes_a_failed_update_good(own_weights, failing):
    net, optimizer, step = training(own_weights=own_weights)
    other, their_optimizer, unharmed = training()
    step(*batch()), unharmed(*batch())
    if own_weights:
        step.read_weights()
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    state = {"state": {}, **optimizer.state_dict()}
    state["state"] = {k: {n: v.clone() for n, v in of.items()} for k, of in state["state"].items()}
    mend = failing(AdamKernel, "__call__")
    with pytest.raises(UpdateError):
        step(*batch(1))
    mend()
    net.load_state_dict(saved)
    if own_weights:
        with pytest.raises(UpdateError):
            step(*batch(1))
        step.write_weights()
    with pytest.raises(UpdateError, match=r"a part of %(a.weight..exp_avg|.group0)"):
        step(*batch(1))  # weights alone are not enough
    optimizer.load_state_dict(state)
    assert torch.equal(step(*batch(1)), unharmed(*batch(1)))
    if own_weights:
        step.read_weights()
    assert same(everything(net, optimizer), everything(other, their_optimizer))


def test_weights_that_are_written_in_part_are_not_enough(failing):
    net, _, step = training(torch.optim.SGD)
    step(*batch())
    mend = failing(SGDKernel, "__call__")
    with pytest.raises(UpdateError):
        step(*batch(1))
    mend()
    with torch.no_grad():
        for parameter in net.a.parameters():
            parameter.zero_()
    with pytest.raises(UpdateError, match=r"a part of %a.weight..momentum_buffer"):
        step(*batch(1))
