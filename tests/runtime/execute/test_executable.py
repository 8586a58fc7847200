"""Check what running a program does: replicas, means, state between calls, and failures."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import (
    Block,
    ExecutionError,
    InputError,
    Options,
    compile_inference,
    compile_training,
)
from ipu_dynamo.testing import assert_close, assert_same_bits, assert_same_training

library = torch.library.Library("ipu_test_executable", "DEF")
library.define("finite(Tensor x) -> Tensor")
library.impl("finite", lambda x: torch.empty_like(x), "Meta")


INTERRUPT = {"now": False}


def finite(x):
    if INTERRUPT["now"]:
        raise KeyboardInterrupt
    if not x.isfinite().all():
        raise FloatingPointError("not finite")
    return x.clone()


library.impl("finite", finite, "CPU")
torch.library.register_autograd(
    "ipu_test_executable::finite", lambda ctx, gradient: gradient, lib=library
)


class Net(nn.Module):
    """Two stages; the second refuses what is not finite, and counts the micro-batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x, y):
        with Block("a", 0):
            h = self.norm(self.first(x))
        with Block("b", 1):
            h = torch.ops.ipu_test_executable.finite(h)
            return F.mse_loss(self.last(h), y)


def batch(rows, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=rng), torch.randn(rows, 2, generator=rng)


def training(model=None, **options):
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return compile_training(model, optimizer, Options(**({"engine": "eager"} | options))), model


def accumulators(step):
    names = [v.name for v in step.program.variables if v.kind == "accumulator"]
    replicas = range(step.options.replicas)
    return [step.executable.tensor(name, replica) for name in names for replica in replicas]


# --- Accumulation and reduction -----------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["post", "running", "post_and_loss"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_mean_strategy_gives_plain_pytorchs_step(reduction, strategy):
    options = Options("eager", 2, 3, 2, reduction=reduction, mean_strategy=strategy, loss_scale=4.0)
    assert_same_training(Net(), [batch(48, s) for s in range(2)], options, rtol=1e-4)


def test_mean_is_the_step_over_the_whole_batch_and_sum_is_larger_by_the_micro_batches():
    x, y = batch(12)
    models = [nn.Linear(3, 2) for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
        model.forward = lambda x, y, m=model: F.mse_loss(F.linear(x, m.weight, m.bias), y)
    before = models[0].weight.detach().clone()
    moves = []
    for model, options in zip(
        models,
        [{}, {"gradient_accumulation": 6}, {"gradient_accumulation": 6, "reduction": "sum"}],
        strict=True,
    ):
        training(model, **options)[0](x, y)
        moves.append(model.weight.detach() - before)
    assert_close(moves[1], moves[0])
    assert_close(moves[2], moves[0] * 6)


def test_accumulators_are_zero_between_calls():
    step, _ = training(gradient_accumulation=2, replicas=2)
    step(*batch(16))
    assert all(not tensor.any() for tensor in accumulators(step))


def test_replicas_share_parameters_and_have_buffers_of_their_own():
    step, model = training(replicas=2)
    step(*batch(8))
    tensors = [
        [step.executable.tensor(n, r) for r in range(2)]
        for n in ("first.weight", "norm.running_mean")
    ]
    assert tensors[0][0] is tensors[0][1] or tensors[0][0].data_ptr() == tensors[0][1].data_ptr()
    assert not torch.equal(*tensors[1])
    assert torch.equal(tensors[1][0], model.norm.running_mean)
    step.write_weights()
    assert torch.equal(*tensors[1])


def test_replicas_of_one_input_group_do_the_same_work():
    one, model = training()
    two, other = training(replicas=2, input_group_size=2)
    for seed in range(2):
        one(*batch(4, seed))
        two(*batch(4, seed))
    assert_close(dict(other.state_dict()), dict(model.state_dict()))


# --- Determinism -----------------------------------------------------------------------------


def test_two_runs_of_one_program_give_the_same_bits():
    def run():
        step, model = training(gradient_accumulation=2, replicas=2)
        return [step(*batch(16, s)) for s in range(3)], dict(model.state_dict())

    assert_same_bits(run(), run())


def test_calls_are_counted_when_they_succeed():
    run = compile_inference(nn.Dropout(0.5), Options("eager", seed=0))
    first = run(torch.ones(64))
    with pytest.raises(InputError):
        run(torch.ones(65))
    second = run(torch.ones(64))
    again = compile_inference(nn.Dropout(0.5), Options("eager", seed=0))
    assert_same_bits((first, second), (again(torch.ones(64)), again(torch.ones(64))))
    assert not torch.equal(first, second)


# --- Failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_failed_call_leaves_the_parameters_of_the_last_complete_step(engine):
    """The second of two steps fails in the third of its micro-batches."""
    options = {"engine": engine, "gradient_accumulation": 3}
    x, y = batch(24)
    step, model = training(device_iterations=2, **options)
    bad = x.clone()
    bad[20] = float("inf")
    with pytest.raises(
        ExecutionError, match=r"FloatingPointError: not finite[\s\S]*stage: 1, micro-batch 5"
    ) as e:
        step(bad, y)
    assert "in forward: h = torch.ops.ipu_test_executable.finite(h)" in e.value.where
    expected, reference = training(**options)
    expected(x[:12], y[:12])
    assert_same_bits(dict(model.named_parameters()), dict(reference.named_parameters()))
    assert all(not tensor.any() for tensor in accumulators(step))
    step(x, y)
    expected(x[:12], y[:12])
    expected(x[12:], y[12:])
    assert_same_bits(dict(model.named_parameters()), dict(reference.named_parameters()))


def test_failed_first_step_changes_no_parameter():
    step, model = training()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ExecutionError, match="stage: 1, micro-batch 0"):
        step(torch.full((4, 3), float("nan")), torch.zeros(4, 2))
    assert_same_bits({n: p.detach() for n, p in model.named_parameters()}, before)


def test_interrupted_call_leaves_the_last_complete_step(monkeypatch):
    step, model = training(gradient_accumulation=2)
    step(*batch(8))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    monkeypatch.setitem(INTERRUPT, "now", True)
    with pytest.raises(KeyboardInterrupt):
        step(*batch(8))
    assert_same_bits({n: p.detach() for n, p in model.named_parameters()}, before)
    assert all(not tensor.any() for tensor in accumulators(step))
