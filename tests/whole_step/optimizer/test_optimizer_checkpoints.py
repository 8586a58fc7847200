"""Check that torch's checkpoints see what a program holds, and that unequal ones are refused."""

import copy
import itertools
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_dynamo import CompileError, InputError, Options, compile_inference, compile_training
from ipu_dynamo.errors import OptionError
from ipu_dynamo.whole_step.optimizer import optimizer_sync

EAGER = Options("eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, y):
        return F.mse_loss(self.b(torch.tanh(self.a(x))), y)


OPTIMIZERS = [
    lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.3),
]


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_training_resumes_from_a_checkpoint(make):
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters())
    step = compile_training(model, optimizer, EAGER)
    for _ in range(3):
        step(*data())
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert len(saved[1]["state"]) == 4
    expected = [step(*data()) for _ in range(2)]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert [step(*data()) for _ in range(2)] == expected


MAKERS = [
    *OPTIMIZERS,
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),  # traced
]


@pytest.mark.parametrize("make", MAKERS)
def test_every_step_of_an_optimizer_goes_on_from_its_newest_state(make):
    """Two compiled steps of other batch sizes, and Python's own, in a drawn order."""
    torch.manual_seed(0)
    model, choose, steps = Net(), random.Random(3), {}
    expected = copy.deepcopy(model)
    optimizer, reference = make(model.parameters()), make(expected.parameters())
    for _ in range(12):
        kind = choose.choice([8, 4, "python"])
        x, y = (tensor[: 8 if kind == "python" else kind] for tensor in data())
        reference.zero_grad()
        expected(x, y).backward()
        reference.step()
        if kind == "python":
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            if kind not in steps:
                steps[kind] = compile_training(model, optimizer, EAGER)
            steps[kind](x, y)
    assert len(steps) == 2
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    steps.clear()
    ours, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("after", [0, 2, 5])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_interrupted_load_is_finished_by_the_next_step(make, after, monkeypatch):
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters())
    step = compile_training(model, optimizer, EAGER)
    for _ in range(3):
        step(*data())
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = [step(*data()) for _ in range(2)]
    model.load_state_dict(saved[0])
    real, count = torch.Tensor.copy_, itertools.count()

    def copy_(self, *args, **kwargs):
        if next(count) == after:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_)
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(saved[1])
    assert [step(*data()) for _ in range(2)] == expected


def test_steps_of_another_thread_leave_the_optimizer_to_be_read_again(monkeypatch):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = compile_training(model, optimizer, EAGER)
    step(*data())
    real = optimizer_sync.export_loss_scale  # what is read last

    def meanwhile(*args):
        monkeypatch.undo()
        step(*data())
        real(*args)

    monkeypatch.setattr(optimizer_sync, "export_loss_scale", meanwhile)
    optimizer.state_dict()
    (count,) = {float(state["step"]) for state in optimizer.state_dict()["state"].values()}
    assert count == 2


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_parameters_with_unequal_steps_are_refused(make):
    model = Net()
    optimizer = make(model.parameters())
    model.a.requires_grad_(False)
    for _ in range(3):
        optimizer.zero_grad()
        model(*data()).backward()
        optimizer.step()
    model.a.requires_grad_(True)
    with pytest.raises(InputError, match=r"for b\.bias and 0 for a\.\w+, which are"):
        compile_training(model, optimizer, EAGER)(*data())


def test_schedulers_do_not_warn():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = compile_training(model, optimizer, EAGER)
    step(*data())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_training_without_an_optimizer_is_refused():
    with pytest.raises(CompileError, match="training needs an optimizer, got None"):
        compile_training(Net(), None)


def test_a_loss_in_place_of_the_optimizer_and_other_options_are_named():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CompileError, match="training needs an optimizer, got CrossEntropyLoss"):
        compile_training(model, torch.nn.CrossEntropyLoss(), optimizer)
    with pytest.raises(OptionError, match="not an object of class CrossEntropyLoss"):
        compile_training(model, optimizer, torch.nn.CrossEntropyLoss())


def test_training_on_narrowed_copies_is_refused():
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, Options("eager", narrow=True))
    with pytest.raises(CompileError, match=r"parameter a\.weight is torch\.float64"):
        step(*(tensor.double() for tensor in data()))


def test_what_the_user_writes_reaches_every_replica():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.ones(1))

        def forward(self, x):
            self.k.mul_(1.0)
            return x * self.k

    model = Scaled()
    run = compile_inference(model, Options("eager", replicas=2))
    assert run(torch.ones(2)).tolist() == [1, 1]
    model.k.fill_(5.0)
    assert run(torch.ones(2)).tolist() == [5, 5]


def test_changed_inputs_that_share_memory_are_refused():
    run = compile_inference(lambda x, y: (x.add_(1), y * 1), EAGER)
    tensor = torch.zeros(3)
    with pytest.raises(InputError, match="inputs x and y share memory"):
        run(tensor, tensor)
