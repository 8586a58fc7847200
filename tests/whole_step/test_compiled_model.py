"""Check compiled models as users call them: what goes in, what comes out, what is refused."""

import collections
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import (
    CompileError,
    InputError,
    IpuError,
    Options,
    compile_inference,
    compile_training,
    identity_loss,
)
from ipu_dynamo.testing import assert_close, assert_same_inference, assert_same_training
from ipu_dynamo.whole_step.compiled_model import CompiledModel

EAGER = Options("eager")
Pair = collections.namedtuple("Pair", "first second")


class Net(nn.Module):
    """Batch norm, a tied and a frozen weight; returns loss and outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.runs = 0

    def forward(self, x, y):
        self.runs += 1
        out = self.last(torch.relu(self.second(self.norm(self.first(x)))))
        return F.mse_loss(out, y), out


def batch(rows=8, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=rng), torch.randn(rows, 2, generator=rng)


def compiling(model, options=EAGER, **settings):
    settings = {"lr": 0.1, "momentum": 0.9} | settings
    return compile_training(model, torch.optim.SGD(model.parameters(), **settings), options)


def module(function):
    made = nn.Module()
    made.forward = function
    return made


# --- Training and inference -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_training_is_that_of_plain_pytorch(engine):
    torch.manual_seed(0)
    options = Options(engine, device_iterations=2, gradient_accumulation=2, replicas=2)
    assert_same_training(Net(), [batch(64, seed) for seed in range(3)], options, rtol=1e-4)


@pytest.mark.parametrize("train", [False, True])
def test_inference_reads_the_mode_when_it_compiles(train):
    assert_same_inference(Net().train(train), [batch()] * 2, EAGER)


def test_python_runs_once_for_all_calls():
    model = Net()
    step = compiling(model)
    for seed in range(3):
        step(*batch(seed=seed))
    assert model.runs == 1


def test_compile_does_not_run_the_model():
    model = Net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    step = compiling(model)
    step.compile(*batch())
    assert_close(dict(model.state_dict()), before)
    assert step.functions_compiled == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_caller_may_have_gradients_off(mode):
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    outside, inside = compiling(theirs), compiling(ours)
    for _ in range(2):
        outside(*batch())
    with mode():
        inside(*batch())
    inside(*batch())
    assert_close(ours.state_dict(), theirs.state_dict())


def test_tensors_from_inference_mode_are_inputs():
    with torch.inference_mode():
        x, y = batch()
    assert compiling(Net())(x, y)[1].shape == (8, 2)


def test_autocast_regions_inside_and_around():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.first(x)
            return F.mse_loss(self.last(h.float()), y), h

    assert_same_training(Mixed(), [batch()] * 2, EAGER, loss=0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(batch()[0]).detach()
        run = compile_inference(model, EAGER)
        assert_close(run(batch()[0]), expected)
    assert_close(run(batch()[0]), expected)


def test_backward_pass_of_a_part_without_autocast_is_not_cast():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x, y):
            h = self.first(x)
            with torch.autocast("cpu", enabled=False):
                h = self.second(h.float())
            return F.mse_loss(self.last(h)[:, :2].float(), y)

    torch.manual_seed(0)
    theirs = Mixed()
    ours = copy.deepcopy(theirs)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.5)
    step = compile_training(ours, torch.optim.SGD(ours.parameters(), 0.5), EAGER)
    for _ in range(3):
        given = batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = theirs(*given)
            assert_close(step(*given), loss.detach(), rtol=0, atol=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


# --- Losses ---------------------------------------------------------------------------------------


def test_loss_can_be_a_returned_tensor_by_index():
    torch.manual_seed(0)

    class Two(Net):
        def forward(self, x, y):
            loss, out = super().forward(x, y)
            return {"out": out, "losses": [loss, ((out - y) ** 4).sum()]}

    for index in (1, 2):
        assert_same_training(Two(), [batch()] * 2, EAGER, loss=index)


def test_several_losses_become_one():
    class Two(Net):
        def forward(self, x, y):
            loss, out = super().forward(x, y)
            return identity_loss(loss + 2 * F.l1_loss(out, y), "none"), loss.detach()

    torch.manual_seed(0)
    assert_same_training(Two(), [batch()] * 2, EAGER, loss=lambda r: r[0])


def test_model_without_a_loss_is_refused():
    model = nn.Linear(4, 2)
    model.forward = lambda x, y: x + y.sum()
    step = compiling(model)
    message = r"Couldn't find a loss in graph!\n  try:  .*identity_loss\(value, \"mean\"\)"
    with pytest.raises(CompileError, match=message):
        step(*batch())


@pytest.mark.parametrize("copy_of", [pickle.dumps, copy.copy, copy.deepcopy])
def test_compiled_model_is_not_pickled_or_copied(copy_of):
    run = compile_inference(nn.Linear(2, 2), EAGER)
    with pytest.raises(IpuError, match=r"cannot be pickled or copied\n  try:  ipu_dynamo.save\("):
        copy_of(run)


def test_loss_scale_changes_no_number_but_rounding():
    torch.manual_seed(0)
    options = Options("eager", loss_scale=1024.0, gradient_accumulation=2)
    assert_same_training(Net(), [batch()] * 2, options)


# --- What goes in and comes out -------------------------------------------------------------------


def test_nested_arguments_and_results():
    class Nested(nn.Module):
        def forward(self, one, *rest, scale=2, **more):
            total = one["a"] + rest[0][0] * scale + rest[1].second
            result = collections.OrderedDict(z=total, a=[None, scale, "text"])
            return result, Pair(more["extra"]["m"] * 2, (total - 1,)), None

    def call(value):
        t = torch.full((4, 2), value)
        return {"a": t}, [t + 1], Pair(None, t + 2)

    run = compile_inference(Nested(), Options("eager", 2))
    for value in (1.0, 5.0):
        args, kwargs = call(value), {"scale": 3, "extra": {"m": torch.ones(2)}}
        ours, theirs = run(*args, **kwargs), Nested()(*args, **kwargs)
        assert_close(ours, theirs)
        assert list(ours[0]) == ["z", "a"]
        assert isinstance(ours[1], Pair)


def test_python_objects_come_back_themselves():
    thing = object()
    run = compile_inference(lambda x: (x, thing, 3), EAGER)
    for _ in range(2):
        assert run(torch.ones(1))[1] is thing


def test_results_have_no_gradient_and_memory_of_their_own():
    step = compiling(Net())
    x, y = batch()
    first = step(x, y)
    kept = [t.clone() for t in first]
    step(*batch(seed=1))
    assert_close(list(first), kept)
    assert not any(t.requires_grad for t in first)


def test_inputs_may_require_grad_and_be_of_any_layout():
    run = compile_inference(lambda x: x * 2, EAGER)
    x = torch.randn(3, 4, requires_grad=True)
    assert torch.equal(run(x), x.detach() * 2)
    other = torch.randn(4, 3).t()
    assert torch.equal(run(other), other * 2)


@pytest.mark.parametrize("options", [EAGER, Options("eager", 2, replicas=2, output_mode="final")])
def test_inputs_changed_in_place_are_written_back(options):
    def model(x, i):
        x.mul_(2)
        x[:, 0] = 7
        i.add_(1)
        return x.sum()

    assert_same_inference(module(model), [(torch.randn(4, 3), torch.arange(4))] * 2, options)
    if options is EAGER:
        x = torch.zeros(4, 6)
        compile_inference(model, options)(x[:, ::2], torch.arange(4))
        assert x[0].tolist() == [7, 0, 0, 0, 0, 0]


def test_input_that_replicas_share_is_written_back_once():
    options = Options("eager", 2, replicas=4, input_group_size=2)
    x = torch.arange(4.0)
    compile_inference(lambda x: x.add_(10).sum(), options)(x)
    assert x.tolist() == [10, 11, 12, 13]


# --- Failures -------------------------------------------------------------------------------------


def test_rows_that_do_not_divide_are_refused_before_anything_is_compiled():
    model = Net()
    step = compiling(model, Options("eager", 2, 3))
    with pytest.raises(InputError, match=r"8 rows of input x, of shape .* into 6 micro-batches"):
        step(*batch(8))
    assert model.runs == 0
    step(*batch(12))


def test_failed_compilation_leaves_a_model_that_can_be_compiled():
    class Fickle(Net):
        def forward(self, x, y):
            if self.runs == 0:
                self.runs += 1
                raise KeyError("mine")
            return super().forward(x, y)

    step = compiling(Fickle())
    with pytest.raises(KeyError):
        step(*batch())
    with pytest.raises(IpuError, match="not compiled yet"):
        step.program  # noqa: B018
    step(*batch())


# --- Weights --------------------------------------------------------------------------------------


def test_own_weights_are_exchanged_on_demand():
    model = Net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = CompiledModel(model, EAGER, optimizer=optimizer, own_weights=True)
    step(*batch())
    assert_close(dict(model.state_dict()), before)
    step.read_weights()
    trained = {name: t.clone() for name, t in model.state_dict().items()}
    assert not torch.equal(trained["last.weight"], before["last.weight"])
    model.load_state_dict(before)
    step.write_weights({"last.weight"})
    step.read_weights()
    assert torch.equal(model.last.weight, before["last.weight"])
    assert torch.equal(model.first.weight, trained["first.weight"])


def test_changes_of_shared_weights_are_seen_by_the_next_call():
    model = nn.Linear(4, 2)
    run = compile_inference(model, EAGER)
    x, _ = batch()
    run(x)
    with torch.no_grad():
        model.weight.zero_()
    assert_close(run(x), model(x).detach())


def test_weights_that_moved_are_noticed():
    model = Net()
    step = compiling(model)
    x, y = batch()
    step(x, y)
    weight = next(model.parameters())
    weight.data = weight.data.clone()
    with pytest.raises(InputError, match="lies in other memory than when the program was compiled"):
        step(x, y)


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_what_a_model_computes_without_autocast_is_not_cast_around_it(
    engine, tmp_path, monkeypatch
):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cast, self.exact = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.cast(x)
            with torch.autocast("cpu", enabled=False):
                return y, self.exact(x).square().sum(1)

    monkeypatch.setenv("IPU_DYNAMO_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8)
    run = compile_inference(model, {"engine": engine})
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            (y, exact), (expected_y, expected) = run(x), model(x)
        assert y.dtype == expected_y.dtype == torch.bfloat16
        assert_close(exact, expected)
