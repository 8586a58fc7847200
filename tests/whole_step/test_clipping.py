"""Check clipping against torch.nn.utils, and against its own rule, wherever gradients come from."""

import copy
import math

import pytest
import torch
from torch import nn

from ipu_dynamo import (
    Block,
    ClipGlobalNorm,
    ClipGradNorm,
    ClipGradValue,
    CompileError,
    Location,
    Locations,
    Options,
    ReplicaGroups,
    Strategy,
    compile_training,
    identity_loss,
)
from ipu_dynamo.errors import NonFiniteNorm
from ipu_dynamo.program import Program
from ipu_dynamo.runtime.update.clip_gradients import GradientNorms, norm

EAGER = {"engine": "eager"}


class Sum(nn.Module):
    """The sum of two layers' outputs, on one IPU or two; inputs scale the gradients."""

    def __init__(self, *, ipus: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.ipus = ipus
        self.to(dtype)

    def forward(self, x):
        with Block("first", ipu_id=0):
            hidden = self.first(x).tanh()
        with Block("second", ipu_id=self.ipus - 1):
            return nn.functional.mse_loss(self.second(hidden), x[:, :2])


def reference(rule, parameters):
    """What `rule` makes of eager gradients."""
    gradients = [p.grad for p in parameters]
    match rule:
        case ClipGradNorm():
            nn.utils.clip_grad_norm_(parameters, rule.max_norm, rule.norm_type)
        case ClipGradValue():
            nn.utils.clip_grad_value_(parameters, rule.clip_value)
        case ClipGlobalNorm():
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            for gradient in gradients:
                gradient *= rule.max_norm / (norm if norm > rule.max_norm else rule.max_norm)


RULES = [
    ClipGradNorm(0.05),
    ClipGradNorm(0.05, norm_type=math.inf),
    ClipGradNorm(0.3, norm_type=1.0),
    ClipGradNorm(100.0),
    ClipGradValue(0.02),
    ClipGlobalNorm(0.05),
]
PLACES = {
    "accumulation": (1, {"gradient_accumulation": 4}),
    "pipeline": (2, {"gradient_accumulation": 4, "strategy": Strategy("pipelined")}),
    "replicas": (1, {"gradient_accumulation": 2, "replicas": 2}),
    "running mean": (1, {"gradient_accumulation": 4, "mean_strategy": "running"}),
    "loss scale": (2, {"gradient_accumulation": 4, "loss_scale": 16.0}),
    "variable loss scale": (
        2,
        {"gradient_accumulation": 4, "loss_scale": 16.0, "loss_scale_is_variable": True},
    ),
    "everything": (
        2,
        {
            "gradient_accumulation": 4,
            "replicas": 2,
            "loss_scale": 16.0,
            "strategy": Strategy("pipelined"),
            "locations": Locations(optimizer_state=Location(sharded=True, min_sharded=1)),
        },
    ),
    "several steps": (1, {"device_iterations": 2, "gradient_accumulation": 2}),
}


CASES = [
    *((rule, "everything") for rule in RULES),
    *((rule, "replicas") for rule in RULES),
    *((RULES[0], place) for place in PLACES),
]


@pytest.mark.few(10)
@pytest.mark.parametrize(("rule", "place"), CASES, ids=str)
def test_clips_as_the_reference_does(rule, place):
    ipus, options = PLACES[place]
    model = Sum(ipus=ipus)
    theirs = copy.deepcopy(model)
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters()}]
    settings = {"lr": 0.1, "momentum": 0.9}
    optimizer = torch.optim.SGD(groups, **settings)
    step = compile_training(model, optimizer, EAGER | options, clip=rule)
    optimizer = torch.optim.SGD(theirs.parameters(), **settings)
    for x in torch.randn(3, 8, 3):
        step(x)
        for part in x.split(4 if place == "several steps" else 8):
            optimizer.zero_grad()
            theirs(part).backward()
            reference(rule, list(theirs.parameters()))
            optimizer.step()
    for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    assert Program.parse(step.program.text()) == step.program


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("rule", [ClipGradNorm(0.05), ClipGradValue(0.02)], ids=str)
def test_clips_in_the_precision_of_gradients(dtype, rule):
    model = Sum(dtype=dtype)
    theirs = copy.deepcopy(model).double()
    options = EAGER | {"gradient_accumulation": 2}
    step = compile_training(model, torch.optim.SGD(model.parameters(), 1.0), options, clip=rule)
    x = torch.randn(4, 3, dtype=dtype)
    step(x)
    theirs(x.double()).backward()
    reference(rule, list(theirs.parameters()))
    for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        limit = 1e-15 if dtype == torch.float64 else 1e-3
        torch.testing.assert_close(ours.double(), expected - expected.grad, rtol=0, atol=limit)


def test_one_norm_is_that_of_all_groups_and_shards():
    """Weights of which each group of replicas has its own count with all groups."""
    model = Grouped()
    options = EAGER | {
        "replicas": 2,
        "replica_groups": {"w": ReplicaGroups(1)},
        "reduction": "sum",
        "input_group_size": 1,
    }
    step = compile_training(
        model, torch.optim.SGD(model.parameters(), 1.0), options, clip=ClipGradNorm(1.0)
    )
    step(torch.tensor([[3.0], [4.0]]))  # gradients 3 and 4, so the norm is 5
    expected = torch.tensor([[-0.6], [-0.8]])
    torch.testing.assert_close(model.w.detach(), expected, rtol=0, atol=1e-6)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 1))

    def forward(self, x):
        return identity_loss((x * self.w).sum(), "none")


class Scaled(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return identity_loss((x * self.w).sum(), "none")


@pytest.mark.parametrize(
    ("rule", "gradient", "expected"),
    [
        (ClipGlobalNorm(1.0), [1.0, math.inf, -2.0], [0.0, math.nan, 0.0]),
        (ClipGlobalNorm(1.0), [1.0, math.nan, 8.0], [-1.0, math.nan, -8.0]),
        (ClipGradNorm(1.0), [1.0, math.inf, -2.0], [0.0, math.nan, 0.0]),
        (ClipGradNorm(1.0), [1.0, math.nan, 8.0], [math.nan] * 3),
        (ClipGradNorm(0.0), [1.0, 2.0, 8.0], [0.0, 0.0, 0.0]),
        (ClipGradValue(1.5), [1.0, math.nan, -math.inf], [-1.0, math.nan, 1.5]),
    ],
    ids=str,
)
def test_what_is_not_finite_is_as_the_rule_says(rule, gradient, expected):
    model = Scaled()
    step = compile_training(model, torch.optim.SGD([model.w], 1.0), EAGER, clip=rule)
    step(torch.tensor([gradient]))
    torch.testing.assert_close(model.w.detach(), torch.tensor(expected), equal_nan=True)
    if not isinstance(rule, ClipGlobalNorm):
        other = nn.Parameter(torch.zeros(3))
        other.grad = torch.tensor(gradient)
        reference(rule, [other])
        torch.testing.assert_close(model.w.detach(), -other.grad, equal_nan=True)


def test_a_norm_that_is_not_finite_can_be_an_error_that_changes_nothing():
    model = Scaled()
    rule = ClipGradNorm(1.0, error_if_nonfinite=True)
    optimizer = torch.optim.Adam([model.w], 1.0)
    step = compile_training(model, optimizer, EAGER | {"gradient_accumulation": 2}, clip=rule)
    good = torch.tensor([[3.0, 4.0, 0.0]] * 2)
    step(good)
    before = model.w.detach().clone()
    state = copy.deepcopy(optimizer.state_dict())["state"][0]
    with pytest.raises(NonFiniteNorm, match="order 2 of the gradients is inf") as info:
        step(torch.tensor([[math.inf, 1.0, 0.0]] * 2))
    assert isinstance(info.value, RuntimeError)  # as torch raises it
    assert torch.equal(model.w, before)
    now = optimizer.state_dict()["state"][0]
    assert torch.equal(now["exp_avg"], state["exp_avg"])
    step(good)
    assert not torch.equal(model.w, before)


def test_rules_refuse_limits_that_are_none():
    with pytest.raises(ValueError, match=r"max_norm is -1\.0"):
        ClipGradNorm(-1.0)
    with pytest.raises(ValueError, match="max_norm is nan"):
        ClipGlobalNorm(math.nan)
    with pytest.raises(ValueError, match="norm_type is 0"):
        ClipGradNorm(1.0, norm_type=0)
    with pytest.raises(TypeError, match="clip_value is 'a'"):
        ClipGradValue("a")
    with pytest.raises(CompileError, match=r"clip is 1\.0, which is no rule"):
        compile_training(Scaled(), torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0), clip=1.0)


def test_another_optimizer_is_clipped_alike():
    model = Scaled()
    step = compile_training(model, torch.optim.SGD([model.w], 1.0), EAGER, clip=ClipGradNorm(1.0))
    step(torch.tensor([[3.0, 4.0, 0.0]]))
    step.set_optimizer(torch.optim.SGD([model.w], 2.0))
    step(torch.tensor([[3.0, 4.0, 0.0]]))
    torch.testing.assert_close(model.w.detach(), torch.tensor([-1.8, -2.4, 0.0]))


@pytest.mark.parametrize("numel", [0, 1, 4096, 4097, 100_003])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_norms_do_not_depend_on_threads(numel, p):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        norms = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            norms.add(norm(values, torch.float32, p).item())
    finally:
        torch.set_num_threads(threads)
    expected = values.double().norm(p).item() if numel else 0.0
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(expected, rel=1e-6)


def test_norms_of_halves_are_summed_in_float32():
    result = torch.zeros(())
    GradientNorms([torch.full((4, 4), 6e4, dtype=torch.float16)], 2.0, result, None)()
    assert result.item() > 65504.0


@pytest.mark.parametrize(("dtype", "peak"), [(torch.float16, 20000.0), (torch.bfloat16, 1.0)])
@pytest.mark.parametrize("mean", ["post", "running", "post_and_loss"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_half_gradients_are_summed_in_float32(dtype, peak, mean, replicas):
    model = Scaled().to(dtype)
    options = EAGER | {"gradient_accumulation": 8, "mean_strategy": mean, "replicas": replicas}
    step = compile_training(model, torch.optim.SGD([model.w], 2.0**-10), options)
    rows = torch.full((8 * replicas, 3), peak, dtype=dtype)
    rows[1::2] += peak / 64  # lost where a half holds the sum
    step(rows)
    expected = -(rows.double().mean(0) * 2.0**-10).to(dtype)
    assert torch.equal(model.w.detach(), expected)
    sums = [v for v in step.program.variables if v.kind == "accumulator"]
    assert {v.type.dtype for v in sums} == {torch.float32}
    assert Program.parse(step.program.text()) == step.program


def test_what_is_not_summed_stays_as_it_is():
    model = Scaled().half()
    step = compile_training(model, torch.optim.SGD([model.w], 1.0), Options(engine="eager"))
    step(torch.ones(1, 3, dtype=torch.half))
    sums = [v for v in step.program.variables if v.kind == "accumulator"]
    assert {v.type.dtype for v in sums} == {torch.float16}
