"""Check that compiled models follow their optimiser, and exchange its state with torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import CompileError, InputError, Options, compile_training
from ipu_dynamo.testing import assert_close, assert_same_training

EAGER = Options("eager")
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01
    ),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x, y):
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y)


def batch(seed=0, rows=4):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=rng), torch.randn(rows, 2, generator=rng)


def plain(model, optimizer, seeds, rows=4):
    for seed in seeds:
        optimizer.zero_grad()
        model(*batch(seed, rows)).backward()
        optimizer.step()


def both(make, options=EAGER):
    """A compiled step with its model and optimiser, and an equal model and optimiser of torch."""
    ours, theirs = Net(), Net()
    mine, other = make(ours.parameters()), make(theirs.parameters())
    return compile_training(ours, mine, options), ours, mine, theirs, other


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_trains_as_torchs(make):
    assert_same_training(
        Net(), [batch(seed) for seed in range(4)], EAGER, optimizer=lambda m: make(m.parameters())
    )


def test_groups_have_numbers_of_their_own():
    def make(model):
        groups = [{"params": model.first.parameters(), "lr": 0.5}, {"params": [model.last.weight]}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    assert_same_training(Net(), [batch(s) for s in range(3)], EAGER, optimizer=make)


# --- New numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.2, torch.tensor(0.2)], ids=["number", "tensor"])
def test_scheduler_acts_from_the_next_call_without_compiling(rate):
    rates = [copy.copy(rate), copy.deepcopy(rate)]
    step, ours, mine, theirs, other = both(
        lambda p: torch.optim.SGD(p, lr=rates.pop(), momentum=0.5)
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (mine, other)]
    for seed in range(4):
        step(*batch(seed))
        plain(theirs, other, [seed])
        for scheduler in schedulers:
            scheduler.step()
        assert step.functions_compiled == 1
    assert_close(ours.state_dict(), theirs.state_dict())


def test_tensor_changed_in_place_is_followed():
    step, ours, mine, *_ = both(lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)))
    step(*batch())
    mine.param_groups[0]["lr"].zero_()
    before = copy.deepcopy(ours.state_dict())
    step(*batch())
    assert_close(ours.state_dict(), before)


def test_another_optimizer_brings_its_numbers_and_keeps_the_state():
    step, ours, _, theirs, other = both(OPTIMIZERS["momentum"])
    step(*batch(0))
    plain(theirs, other, [0])
    step.set_optimizer(torch.optim.SGD(ours.parameters(), lr=0.3, momentum=0.2, weight_decay=0.0))
    other.param_groups[0].update(lr=0.3, momentum=0.2, dampening=0, weight_decay=0.0)
    step(*batch(1))
    plain(theirs, other, [1])
    assert_close(ours.state_dict(), theirs.state_dict())
    assert step.functions_compiled == 1


def test_optimizer_may_be_set_before_the_first_call():
    step, ours, *_ = both(OPTIMIZERS["sgd"])
    step.set_optimizer(torch.optim.SGD(ours.parameters(), lr=0.0))
    before = copy.deepcopy(ours.state_dict())
    step(*batch())
    assert_close(ours.state_dict(), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: torch.optim.Adam(m.parameters(), lr=0.1), "would need the update adam"),
        (
            lambda m: torch.optim.SGD(m.first.parameters(), lr=0.1),
            "differ in last.bias, last.weight",
        ),
        (
            lambda m: torch.optim.SGD([{"params": [p]} for p in m.parameters()], lr=0.1),
            "has 4 parameter groups, the program 1",
        ),
    ],
)
def test_optimizer_that_needs_another_program_is_refused_and_training_goes_on(make, message):
    step, ours, _, theirs, other = both(OPTIMIZERS["sgd"])
    step(*batch(0))
    with pytest.raises(InputError, match=message):
        step.set_optimizer(make(ours))
    step(*batch(1))
    plain(theirs, other, [0, 1])
    assert_close(ours.state_dict(), theirs.state_dict())


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = Net()
    step = compile_training(model, torch.optim.LBFGS(model.parameters()), EAGER)
    with pytest.raises(CompileError, match=r"torch\.optim\.lbfgs\.LBFGS cannot be traced"):
        step(*batch())


# --- State ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_torch_goes_on_from_our_state(make):
    step, ours, mine, theirs, other = both(make)
    for seed in range(2):
        step(*batch(seed))
    step.read_optimizer_state()
    plain(ours, mine, [2, 3])
    plain(theirs, other, [0, 1, 2, 3])
    assert_close(ours.state_dict(), theirs.state_dict())
    assert_close(mine.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_from_a_torch_checkpoint(make):
    step, ours, mine, theirs, other = both(make)
    plain(theirs, other, [0, 1])
    ours.load_state_dict(theirs.state_dict())
    mine.load_state_dict(copy.deepcopy(other.state_dict()))
    for seed in (2, 3):
        step(*batch(seed))
    plain(theirs, other, [2, 3])
    assert_close(ours.state_dict(), theirs.state_dict())


def test_compiling_again_keeps_weights_and_state():
    step, ours, _, theirs, other = both(OPTIMIZERS["adam"])
    for rows, seed in ((4, 0), (6, 1), (4, 2)):
        step.compile(*batch(seed, rows))
        step(*batch(seed, rows))
        plain(theirs, other, [seed], rows)
    assert_close(ours.state_dict(), theirs.state_dict())


def test_state_is_copied_and_not_shared():
    step, _, mine, *_ = both(OPTIMIZERS["adam"])
    step(*batch())
    step.read_optimizer_state()
    kept = {parameter: dict(state) for parameter, state in mine.state.items()}
    before = copy.deepcopy(list(kept.values()))
    step(*batch(1))
    assert_close(list(kept.values()), before)
