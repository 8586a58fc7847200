"""Check that nobody sees old weights where an executor has newer ones, nor loses what it learnt."""

import contextlib
import copy
import gc
import os
import signal
import sys

import pytest
import torch
from torch import nn

import poptorch
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.weights.dual_view import DualView
from poptorch import weights as weights_module
from poptorch import wrapping
from tests.poptorch.executor.models import Classifier, Layer, Weighted, batch

ONE = torch.ones(1)
GOOD, BAD = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 7])  # rows of a table of 5
CLASSES = torch.tensor([0, 1, 0, 1])
OPTIMIZERS = {
    "poptorch SGD": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9),
    "poptorch Adam": lambda p: poptorch.optim.Adam(p, lr=0.1),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
}


class Table(nn.Module):
    """A model whose steps fail on the rows `BAD`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, rows, classes=None):
        out = self.last(self.table(rows))
        return out if classes is None else nn.functional.cross_entropy(out, classes)


class Steps:
    """An executor with three device iterations, and PyTorch doing the same."""

    def __init__(self):
        self.model, self.reference = Table(), Table()
        self.optimizer = poptorch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.executor = poptorch.trainingModel(
            self.model, poptorch.Options().deviceIterations(3), self.optimizer
        )
        self.executor.compile(torch.cat([GOOD] * 3), torch.cat([CLASSES] * 3))
        self._optimizer = torch.optim.SGD(self.reference.parameters(), lr=0.5, momentum=0.9)

    def __call__(self, *rows):
        """Run a call; PyTorch makes the steps that do not fail."""
        fails = any(r is BAD for r in rows)
        with pytest.raises(poptorch.Error) if fails else contextlib.nullcontext():
            self.executor(torch.cat(rows), torch.cat([CLASSES] * 3))
        for r in rows:
            if r is BAD:
                break
            self._optimizer.zero_grad()
            self.reference(r, CLASSES).backward()
            self._optimizer.step()

    def check(self):
        torch.testing.assert_close(dict(self.model.state_dict()), dict(self.reference.state_dict()))


def assert_same(model, reference):
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))


# --- Calls that fail ------------------------------------------------------------------------------


def test_the_host_gets_the_steps_that_a_failed_call_completed():
    steps = Steps()
    steps.optimizer.state_dict()
    steps(GOOD, GOOD, BAD)
    steps.check()
    momentum = steps.optimizer.state_dict()["ipu_state"]["Accl1___last.weight"]
    expected = steps._optimizer.state[steps.reference.last.weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, expected)


def test_detaching_keeps_the_steps_that_a_failed_call_completed():
    steps = Steps()
    steps(GOOD, GOOD, BAD)
    steps.executor.detachFromDevice()
    steps.executor.attachToDevice()
    steps.check()
    steps(GOOD, GOOD, GOOD)
    steps.check()


def test_inference_follows_a_failed_call():
    steps = Steps()
    follower = poptorch.inferenceModel(steps.executor)
    follower(GOOD)
    steps(GOOD, BAD, GOOD)
    torch.testing.assert_close(follower(GOOD), steps.reference(GOOD).detach())


def test_a_call_that_is_refused_makes_no_step():
    steps = Steps()
    before = copy.deepcopy(dict(steps.model.state_dict()))
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        steps.executor(GOOD, CLASSES)
    torch.testing.assert_close(dict(steps.model.state_dict()), before)


# --- Copies that are interrupted ------------------------------------------------------------------


@contextlib.contextmanager
def interrupted(monkeypatch, after):
    """Interrupt the copy of a tensor after so many others."""
    real, count = torch.Tensor.copy_, iter(range(10**6))

    def copy_(self, *args, **kwargs):
        if next(count) == after:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.few(6)
@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize(
    "look", [lambda e: e.model.state_dict(), lambda e: e.copyWeightsToHost(), lambda e: e.destroy()]
)
def test_an_interrupted_fetch_is_made_again(look, after, monkeypatch):
    model, reference = Classifier(), Classifier()
    trainers = [
        poptorch.trainingModel(m, None, torch.optim.SGD(m.parameters(), lr=0.1))
        for m in (model, reference)
    ]
    for trainer in trainers:
        trainer(*batch(4))
    with interrupted(monkeypatch, after):
        look(trainers[0])
    assert_same(model, reference)
    for trainer in trainers:
        trainer(*batch(4, seed=1))
    assert_same(model, reference)


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("training", [False, True])
def test_an_interrupted_upload_is_made_before_the_next_call(training, after, monkeypatch):
    model = Classifier()
    if training:
        executor = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        executor = poptorch.inferenceModel(model)
    executor(*batch(4))
    other = {name: tensor + 1 for name, tensor in Classifier().state_dict().items()}
    model.load_state_dict(other)
    with interrupted(monkeypatch, after):
        executor.copyWeightsToDevice()
    expected = Classifier()
    expected.load_state_dict(other)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    torch.testing.assert_close(executor(*batch(4)), tuple(t.detach() for t in expected(*batch(4))))


def test_an_interrupted_upload_of_what_another_trained_is_made_again(monkeypatch):
    model = Classifier()
    trainer = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    follower = poptorch.inferenceModel(model)
    follower(*batch(4))
    trainer(*batch(4))
    model.state_dict()
    with interrupted(monkeypatch, 2):
        follower(*batch(4))
    expected = tuple(t.detach() for t in copy.deepcopy(model)(*batch(4)))
    torch.testing.assert_close(follower(*batch(4)), expected)


def test_an_interrupted_look_for_who_trains_is_made_again(monkeypatch):
    model = Weighted()
    follower = poptorch.inferenceModel(model)
    assert follower(ONE) == 1
    training = poptorch.trainingModel(model, None, poptorch.optim.SGD(model.parameters(), lr=1.0))
    training(ONE)

    def interrupted(model):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights_module, "trainers_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            follower(ONE)
    assert follower(ONE) == 0


def test_an_executor_that_is_half_destroyed_wraps_its_model_again(monkeypatch):
    model, x, real, calls = Layer(), torch.ones(2, 4), wrapping._wrapped_class, []
    training = poptorch.trainingModel(model, None, poptorch.optim.SGD(model.parameters(), lr=1.0))
    training(x)

    def interrupted(plain, layers):
        calls.append(plain)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(plain, layers)

    with monkeypatch.context() as patch:
        patch.setattr(wrapping, "_wrapped_class", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.destroy()
    before = model.own.weight.detach().clone()
    training(x)
    assert not torch.equal(model.own.weight, before)
    training.destroy()
    assert type(model) is Layer
    assert {type(tensor) for tensor in model.parameters()} == {nn.Parameter}


def test_a_signal_while_an_executor_is_freed_loses_no_weights(monkeypatch):
    """Python drops what its handler raises there."""

    def tell(number, frame):
        raise KeyboardInterrupt

    def sync_host(weights):
        if weights.newer_on_device:
            os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(100):  # in which the handler would run
            pass
        return real(weights)

    model, real, dropped = Weighted(), DualView.sync_host, []
    training = poptorch.trainingModel(model, None, poptorch.optim.SGD(model.parameters(), lr=1.0))
    training(ONE)
    before = signal.signal(signal.SIGUSR1, tell)
    try:
        monkeypatch.setattr(DualView, "sync_host", sync_host)
        monkeypatch.setattr(sys, "unraisablehook", lambda error: dropped.append(error.exc_type))
        del training
        gc.collect()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert dropped == [KeyboardInterrupt]
    assert type(model) is Weighted
    assert model.w.tolist() == [0.0]


# --- Several executors on the same tensors --------------------------------------------------------


class Discriminate(nn.Module):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, x, z):
        with torch.no_grad():
            fake = self.generator(z)
        loss = (1 - self.discriminator(x)).square().mean() + self.discriminator(
            fake
        ).square().mean()
        return poptorch.identity_loss(loss, "none")


class Generate(nn.Module):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, z):
        loss = (1 - self.discriminator(self.generator(z))).square().mean()
        return poptorch.identity_loss(loss, "none")


class Adversaries:
    """A generator and a discriminator, each with a model that trains it."""

    def __init__(self):
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        self.parts = nn.ModuleList([self.generator, self.discriminator])
        self.models = [
            Discriminate(self.generator, self.discriminator),
            Generate(self.generator, self.discriminator),
        ]
        self.optimizers = [
            torch.optim.SGD(part.parameters(), lr=0.1)
            for part in (self.discriminator, self.generator)
        ]


def adversarial_data(steps):
    rng = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (
            (torch.randn(8, 2, generator=rng), torch.randn(8, 4, generator=rng)),
            (torch.randn(8, 4, generator=rng),),
        )


@pytest.mark.parametrize("read_between", [False, True])
def test_two_trainers_of_shared_modules_train_as_pytorch_does(read_between):
    ours, theirs = Adversaries(), Adversaries()
    executors = [
        poptorch.trainingModel(model, None, optimizer)
        for model, optimizer in zip(ours.models, ours.optimizers, strict=True)
    ]
    for data in adversarial_data(4):
        for executor, model, optimizer, args in zip(
            executors, theirs.models, theirs.optimizers, data, strict=True
        ):
            optimizer.zero_grad()
            loss = model(*args)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(executor(*args), loss.detach())
            if read_between:
                ours.generator.state_dict()
    counts = {name for name in ours.parts.state_dict() if name.endswith("num_batches_tracked")}
    for name, tensor in theirs.parts.state_dict().items():
        if name not in counts:  # as in PopTorch, batch norms do not count
            torch.testing.assert_close(ours.parts.state_dict()[name], tensor)


def test_an_explicit_copy_leaves_what_another_has_trained():
    ours = Adversaries()
    first, second = (
        poptorch.trainingModel(model, None, optimizer)
        for model, optimizer in zip(ours.models, ours.optimizers, strict=True)
    )
    ((real, noise), (more,)), *_ = adversarial_data(1)
    second(more)
    first(real, noise)
    trained = copy.deepcopy(dict(ours.discriminator.state_dict()))
    second.copyWeightsToHost()
    torch.testing.assert_close(dict(ours.discriminator.state_dict()), trained)


def test_all_follow_weights_that_the_user_uploads_to_one():
    model = Weighted()
    trainer = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=1.0))
    follower = poptorch.inferenceModel(model)
    trainer(ONE)
    assert follower(ONE) == 0
    trainer.load_state_dict({"w": torch.tensor([7.0])})
    assert follower(ONE) == 7


def test_a_trainer_that_was_destroyed_is_followed():
    model = Weighted()
    follower = poptorch.inferenceModel(model)
    assert follower(ONE) == 1
    trainer = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=1.0))
    trainer(ONE)
    trainer.destroy()
    assert follower(ONE) == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_classes_of_shared_tensors_come_back_in_any_order(order):
    ours = Adversaries()
    executors = [
        poptorch.trainingModel(model, None, optimizer)
        for model, optimizer in zip(ours.models, ours.optimizers, strict=True)
    ]
    weight, mean = ours.generator[0].weight, ours.generator[1].running_mean
    for executor in executors:
        assert isinstance(weight, executor.PoptorchParameter)
        assert isinstance(mean, executor.PoptorchBuffer)
    first, last = (executors[i] for i in order)
    first.destroy()
    assert type(weight) is last.PoptorchParameter
    assert type(mean) is last.PoptorchBuffer
    last.destroy()
    assert (type(weight), type(mean)) == (nn.Parameter, torch.Tensor)


# --- The optimiser's state ------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("again", ["same executor", "another"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_goes_on_after_destroy(make, again):
    ours, theirs = Classifier(), Classifier()
    optimizers = [make(model.parameters()) for model in (ours, theirs)]
    executor, reference = (
        poptorch.trainingModel(model, None, optimizer)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True)
    )
    for seed in range(4):
        if seed == 2:
            executor.destroy()
            if again == "another":
                executor = poptorch.trainingModel(ours, None, optimizers[0])
        executor(*batch(4, seed))
        reference(*batch(4, seed))
    assert_same(ours, theirs)


def test_a_destroyed_executor_leaves_the_optimizer_to_the_one_that_has_it():
    model = Weighted()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    first, second = (
        poptorch.trainingModel(nn.Sequential(model), None, optimizer) for _ in range(2)
    )
    first(ONE)
    second(ONE)
    first.destroy()
    second(ONE)
    assert optimizer.state_dict()["ipu_state"]["Step___0.w"] == 3


def test_a_state_of_other_shapes_is_refused():
    models = Weighted(), Weighted()
    models[1].w = nn.Parameter(torch.ones(2))
    optimizer = poptorch.optim.SGD(
        [p for model in models for p in model.parameters()], lr=1.0, momentum=0.5
    )
    first = poptorch.trainingModel(models[0], None, optimizer)
    first(ONE)
    first.destroy()
    second = poptorch.trainingModel(models[1], None, optimizer)
    with pytest.raises(poptorch.Error, match=r"Accl1___w has shape \[1\], and the model's \[2\]"):
        second(torch.ones(2))


# --- A model that is no longer the one that was compiled ------------------------------------------


def assign(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace(model):
    model.second.weight = nn.Parameter(torch.zeros(3, 8))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("change", [assign, replace])
def test_a_replaced_parameter_is_refused(change, training):
    model = Classifier()
    if training:
        executor = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        executor = poptorch.inferenceModel(model)
    executor(*batch(4))
    change(model)
    for use in (lambda: executor(*batch(4)), executor.copyWeightsToDevice):
        with pytest.raises(poptorch.Error, match=r"weight is not the one .* compiled with"):
            use()
    executor.destroy()
    if training:
        executor.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    expected = model(*batch(4))
    torch.testing.assert_close(executor(*batch(4)), tuple(t.detach() for t in expected))


def test_another_mode_is_said_once_and_changes_nothing(caplog):
    model = nn.Sequential(Classifier(), nn.Dropout(0.5)).eval()
    executor = poptorch.inferenceModel(model)
    x = batch(4)[0]
    expected = executor(x)
    model[1].train()
    for _ in range(2):
        assert torch.equal(executor(x), expected)
    said = [r for r in caplog.records if "in train mode, and was in eval mode" in r.getMessage()]
    assert len(said) == 1


def test_reads_are_of_what_calls_change_only(monkeypatch):
    model = Classifier()
    model.first.requires_grad_(False)
    read = []
    monkeypatch.setattr(CompiledModel, "read_weights", lambda core, names: read.append(set(names)))
    trainer = poptorch.trainingModel(
        model, None, torch.optim.SGD(model.second.parameters(), lr=0.1)
    )
    trainer(*batch(4))
    model.state_dict()
    assert read == [{"second.weight", "second.bias"}]
