"""Check that training goes on from a checkpoint with the bits of not having stopped."""

import copy
import tempfile
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import (
    AutomaticLossScaling,
    BeginBlock,
    InputError,
    ReplicaGroups,
    TracedUpdate,
    compile_training,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from ipu_dynamo.errors import UpdateError
from ipu_dynamo.ops.updates.update_kernels import SGDKernel
from ipu_dynamo.testing import assert_same_bits, options_for, recipes
from tests.properties.running import calls, draw_placement, slow

EAGER = {"engine": "eager"}
OPTIMIZERS = {
    "sgd": slow,
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3),  # traced
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-3),  # and traced anew
}


def held(step):
    """All that lasts of a training step, on all replicas."""
    step.executable.check_update()
    kinds = ("parameter", "buffer", "state", "loss_scale")
    names = [v.name for v in step.program.variables if v.kind in kinds]
    replicas = range(step.program.replicas)
    left = {(n, r): step.executable.tensor(n, r).clone() for n in names for r in replicas}
    model = {name: tensor.detach().clone() for name, tensor in tensors_of(step.model)}
    return {"left": left, "model": model, "random": step.random_state}


def tensors_of(model):
    return [*model.named_parameters(), *model.named_buffers()]


def compare(step, other):
    """Hold what lasts of two steps to the same bits."""
    found, expected = held(step), held(other)
    for counter in step.settled_counters:  # which one of them may lack
        for left in (found["left"], expected["left"]):
            for replica in range(step.program.replicas):
                left.pop((counter, replica), None)
    assert found["random"] == expected["random"]
    assert_same_bits(found["left"], expected["left"])
    assert_same_bits(found["model"], expected["model"])


@pytest.mark.examples(60)
@pytest.mark.quick(2)
@given(
    recipe=recipes(random=True),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    steps=st.integers(1, 3),
    ready=st.sampled_from(["not compiled", "compiled", "trained"]),
    data=st.data(),
)
def test_goes_on_with_the_same_bits(recipe, optimizer, steps, ready, data):
    placement = draw_placement(data, recipe)
    options = data.draw(options_for(placement=placement))
    batches = calls(recipe, options)

    def made():
        model = placement.place(recipe.build())
        return compile_training(model, OPTIMIZERS[optimizer](model), options)

    step, other = made(), made()
    for number in range(steps):
        step(*copy.deepcopy(batches[number % 2]))
    if ready == "compiled":
        other.compile(*copy.deepcopy(batches[0]))
    elif ready == "trained":
        other(*copy.deepcopy(batches[1]))
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(folder, step, {"batch": steps})
        assert latest_checkpoint(folder) == path
        assert load_checkpoint(folder, other) == {"batch": steps}
    if ready == "not compiled":
        assert_same_bits(dict(tensors_of(other.model)), dict(tensors_of(step.model)))
        other.compile(*copy.deepcopy(batches[0]))
    compare(other, step)
    for number in range(2):
        expected = step(*copy.deepcopy(batches[number]))
        assert_same_bits(other(*copy.deepcopy(batches[number])), expected)
    compare(other, step)


class Net(nn.Module):
    """Tied weights, a batch norm, dropout, tensors that no program reads or no state has."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.first.weight
        self.unread = nn.Parameter(torch.randn(2))
        self.register_buffer("scratch", torch.ones(1), persistent=False)
        self.to(dtype)

    def forward(self, x, y):
        h = F.dropout(torch.relu(self.norm(self.first(x))), 0.2)
        return F.cross_entropy(self.tied(h) * self.scratch, y)


class Other(Net):
    def __init__(self, **changes) -> None:
        super().__init__()
        for name, module in changes.items():
            setattr(self, name, module)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def made(model=Net, optimizer=sgd, seed=0, **options):
    torch.manual_seed(seed)
    model = model()
    return compile_training(model, optimizer(model), EAGER | options)


def batch(replicas=1, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * replicas, 8, generator=generator).to(dtype)
    return x, torch.randint(0, 8, (4 * replicas,), generator=generator)


def trained(*args, calls=2, replicas=1, dtype=torch.float32, **options):
    step = made(*args, replicas=replicas, **options)
    for number in range(calls):
        step(*batch(replicas, dtype, number))
    return step


def loaded(path, step, replicas=1):
    """Load a checkpoint, as a whole."""
    load_checkpoint(path, step)
    if not step.is_compiled:
        step.compile(*batch(replicas))


def goes_on(step, other, folder, replicas=1, dtype=torch.float32, calls=2):
    """Check that `other` goes on as `step`."""
    load_checkpoint(save_checkpoint(folder, step), other)
    for number in range(calls):
        expected = step(*batch(replicas, dtype, number))
        assert torch.equal(other(*batch(replicas, dtype, number)), expected)
    compare(other, step)


HALF = {
    "narrow": True,
    "stochastic_rounding": True,
    "automatic_loss_scaling": AutomaticLossScaling(period=2),
}


def half():
    return Net(dtype=torch.float16)


@pytest.mark.few(1)
@pytest.mark.parametrize("early", [True, False])
def test_halves_and_their_loss_scale_go_on(early, tmp_path):
    """The optimizer's states in float32 would lose digits in the torch optimizer's."""
    step = trained(half, dtype=torch.float16, seed=3, **HALF)
    other = made(half, seed=4, **HALF) if early else trained(half, dtype=torch.float16, **HALF)
    goes_on(step, other, tmp_path, dtype=torch.float16)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x, y):
        return F.cross_entropy(x @ self.weight, y)


def test_weights_of_groups_of_replicas_go_on(tmp_path):
    options = {"replica_groups": {"weight": ReplicaGroups(2)}}
    step, other = (trained(Grouped, replicas=4, seed=seed, **options) for seed in (0, 1))
    goes_on(step, other, tmp_path, replicas=4)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def staged():
    model = Net()
    BeginBlock(model.first, "first", ipu_id=0)
    BeginBlock(model.tied, "second", ipu_id=1)
    return model


@pytest.mark.parametrize("models", [(Net, staged), (staged, Net)])
def test_stages_may_differ(models, tmp_path):
    """The parameters of an IPU share a count of steps."""
    step, other = trained(models[0], adam), trained(models[1], adam, calls=1, seed=1)
    assert {step.program.num_ipus, other.program.num_ipus} == {1, 2}
    load_checkpoint(save_checkpoint(tmp_path, step), other)
    assert_same_bits(other.states(), step.states())
    assert_same_bits(dict(tensors_of(other.model)), dict(tensors_of(step.model)))
    states = {name: dict(of) for name, of in step.states().items()}
    assert states["first.weight"]["step"].item() == 2


def test_unequal_counts_of_parameters_that_step_together_are_refused(tmp_path):
    def in_groups(model):
        return torch.optim.Adam([{"params": [p]} for p in model.parameters()], lr=0.01)

    torch.manual_seed(0)
    model = Net()
    optimizer = in_groups(model)
    for parameter in (model.norm.weight, model.norm.bias):
        parameter.requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        model(*batch()).backward()
        optimizer.step()
    model.norm.requires_grad_(True)
    step = compile_training(model, optimizer, EAGER)
    step(*batch())
    other = trained(optimizer=adam, seed=1)
    before = held(other)
    problem = r"norm\.\w+\.step is 1\.0 in .*, and 3\.0 for a parameter that is updated together"
    with pytest.raises(InputError, match=problem):
        load_checkpoint(save_checkpoint(tmp_path, step), other)
    assert_same_bits(held(other), before)


class One(nn.Module):
    """A weight: updates of many take long to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x, y):
        return F.cross_entropy(x @ self.weight, y)


def coupled(model):
    def apply(gradients, weights, states, numbers):
        norm = sum(g.square().sum() for g in gradients.values()).sqrt()
        factor = numbers["lr"] / torch.clamp(norm + states["norms"], min=1.0)
        new = {name: weights[name] - g * factor for name, g in gradients.items()}
        return new, {"norms": states["norms"] * 0.5 + norm}

    return TracedUpdate({"norms": 0.0}, apply, {"lr": 0.1})


def test_states_of_no_parameter_go_on(tmp_path):
    goes_on(trained(One, coupled), made(One, coupled, seed=1), tmp_path)


def radam(model):
    return torch.optim.RAdam(model.parameters(), lr=1e-2)


@pytest.mark.few(1, 1)
@pytest.mark.parametrize("calls", [1, 4, 7])
def test_updates_that_are_traced_anew_go_on(calls, tmp_path):
    goes_on(trained(One, radam, calls=calls), made(One, radam), tmp_path, calls=4)


@pytest.mark.few(1)
@pytest.mark.parametrize("again", ["saved", "loaded"])
def test_a_program_that_was_compiled_in_the_middle_has_the_same_states(again, tmp_path):
    """One that is compiled for an optimizer without states counts the steps that make them."""
    step, other = trained(One, radam), made(One, radam, seed=1)
    if again == "loaded":
        other(*batch())
    (step if again == "saved" else other).compile(*batch())
    names = [{v.name for v in one.program.variables} for one in (step, trained(One, radam))]
    assert (names[0] != names[1]) == (again == "saved")
    goes_on(step, other, tmp_path)


@pytest.mark.slow
def test_a_state_that_the_step_has_no_count_for_is_refused(tmp_path):
    step, other = made(One, radam), trained(One, radam)
    for one in (step, other):
        one.compile(*batch())  # the states of the first one are still to be made
    with pytest.raises(InputError, match=r"has .*update\.epoch, and the optimizer has not"):
        load_checkpoint(save_checkpoint(tmp_path, step), other)


def test_every_replica_gets_its_own_buffers(tmp_path):
    step = trained(replicas=2)
    other = trained(replicas=2, calls=1)
    assert not torch.equal(*(step.executable.tensor("norm.running_mean", r) for r in (0, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        goes_on(step, other, tmp_path, replicas=2)
        goes_on(step, made(replicas=2, seed=1), tmp_path, replicas=2)
        step.model.norm.running_mean.fill_(5.0)  # which reaches all replicas
        goes_on(step, other, tmp_path, replicas=2)


@pytest.mark.few(2)
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("early", [True, False])
def test_other_replicas_begin_with_those_of_the_first(replicas, early, tmp_path):
    step = trained(replicas=2)
    other = made(replicas=replicas, seed=1)
    if not early:
        other.compile(*batch(replicas))
    path = save_checkpoint(tmp_path, step)
    with pytest.warns(UserWarning, match=r"norm.* differ between the 2 replicas") as told:
        loaded(path, other, replicas)
    assert len(told) == 1
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        for replica in range(replicas):
            found = other.executable.tensor(name, replica)
            assert torch.equal(found, step.executable.tensor(name))
    assert_same_bits(other.states(), step.states())
    assert other.random_state == step.random_state


def test_one_replica_fills_several_without_a_warning(tmp_path):
    step, other = trained(), trained(replicas=2, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(save_checkpoint(tmp_path, step), other)
    for replica in (0, 1):
        found = other.executable.tensor("norm.running_mean", replica)
        assert torch.equal(found, step.executable.tensor("norm.running_mean"))


@pytest.mark.few(1)
@pytest.mark.parametrize("early", [True, False])
def test_the_torch_optimizer_has_the_states_that_were_loaded(early, tmp_path):
    step, other = trained(optimizer=adam), made(optimizer=adam, seed=1)
    if not early:
        other(*batch())
    load_checkpoint(save_checkpoint(tmp_path, step), other)
    if early:
        other.compile(*batch())
    states = [one._link.optimizer.state_dict()["state"] for one in (other, step)]
    assert [state["step"].item() for state in states[0].values()] == [2] * 4
    assert_same_bits(*states)
    expected = step(*batch())
    assert torch.equal(other(*batch()), expected)  # it goes on with its own states


@pytest.mark.parametrize("write", ["load", "add", "clear"])
def test_states_of_the_optimizer_that_a_checkpoint_would_overwrite_are_refused(write, tmp_path):
    path, other = save_checkpoint(tmp_path, trained(optimizer=adam)), trained(optimizer=adam)
    other.read_optimizer_state()
    optimizer = other._link.optimizer
    fresh = compile_training(other.model, optimizer, EAGER)
    states = optimizer.state_dict()
    load_checkpoint(path, fresh)
    if write == "load":
        optimizer.load_state_dict(states)
    elif write == "add":
        next(iter(optimizer.state.values()))["exp_avg"].add_(1)
    else:
        optimizer.state.clear()
    for _ in range(2):
        with pytest.raises(InputError, match="state was written after load_checkpoint"):
            fresh(*batch())
    load_checkpoint(path, fresh)
    fresh.compile(*batch())
    states = optimizer.state_dict()["state"].values()
    assert [state["step"].item() for state in states] == [2] * 4


def test_the_latest_is_found_in_the_folder(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    step = trained()
    first = save_checkpoint(tmp_path / "runs", step, extra=1)
    second = save_checkpoint(tmp_path / "runs", step, extra=2)
    assert [first.name, second.name] == ["checkpoint-000001", "checkpoint-000002"]
    assert latest_checkpoint(tmp_path / "runs") == second
    assert [load_checkpoint(path, step) for path in (first, second, first.parent)] == [1, 2, 2]


@pytest.mark.few(3)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("model", "optimizer", "problem"),
    [
        (lambda: Other(more=nn.Linear(1, 1)), sgd, r"has no more\.bias, and the model has"),
        (
            lambda: Other(unread=nn.Parameter(torch.ones(3))),
            sgd,
            r"unread is float32\[3\], and float32\[2\] in ",
        ),
        (
            lambda: Other(norm=nn.BatchNorm1d(8, track_running_stats=False)),
            sgd,
            r"has norm\.num_batches_tracked, and the model has not",
        ),
        (
            Net,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
            r"first\.bias is updated by sgd\(\), and in .* by sgd\(momentum\)",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(early, model, optimizer, problem, tmp_path):
    path = save_checkpoint(tmp_path, trained())
    other = made(model, optimizer, seed=1)
    if not early:
        other(*batch())
    before = dict(tensors_of(copy.deepcopy(other.model))) if early else held(other)
    with pytest.raises(InputError, match=problem):
        loaded(path, other)
    if "updated" not in problem:
        after = dict(tensors_of(other.model)) if early else held(other)
        assert_same_bits(after, before)
    elif early:  # a step that does not fit does not run
        assert not other.is_compiled
        with pytest.raises(InputError, match=problem):
            other(*batch())
    else:
        assert_same_bits(held(other), before)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("early", [True, False])
def test_a_fused_step_goes_on(early, tmp_path):
    step, other = trained(One, engine="inductor"), made(One, seed=1, engine="inductor")
    assert step.executable.fused
    if not early:
        other(*batch())
    goes_on(step, other, tmp_path)


def test_a_checkpoint_ends_what_a_failed_update_left(tmp_path, monkeypatch):
    step = trained(One, calls=1)
    path = save_checkpoint(tmp_path, step)
    expected = step(*batch(seed=1))
    real = SGDKernel.__call__

    def fails(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise RuntimeError("no more memory")

    with monkeypatch.context() as patch:
        patch.setattr(SGDKernel, "__call__", fails)
        with pytest.raises(UpdateError):
            step(*batch(seed=1))
    with pytest.raises(UpdateError):
        save_checkpoint(tmp_path, step)
    load_checkpoint(path, step)
    assert torch.equal(step(*batch(seed=1)), expected)
