"""Check that decisions of host passes can be forced, and that results stay those of eager."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import Options, compile_inference, compile_training, serialized_matmul
from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.accumulate import accumulate_matmul
from ipu_dynamo.ops.serialized_loss import serialized_loss_step_
from ipu_dynamo.options import OptionError
from ipu_dynamo.passes.pipeline import ANY_MACHINE, host_passes

CHOICES = {step.name: step.choices for step in host_passes(Options(), ANY_MACHINE) if step.choices}
ONE_MICRO_BATCH = {"FuseStep"}  # what is refused with several
SEVERAL = {"DeferAccumulation"}  # what has nothing to decide with one
X = torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 9


class Net(nn.Module):
    """A convolution, products with and without gelu, and a loss in parts of its columns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 2, 3)
        self.layer, self.last = nn.Linear(8, 10), nn.Linear(10, 9, bias=False)

    def forward(self, x, y=None):
        h = F.gelu(self.layer(self.conv(x).flatten(1)))
        if y is None:
            return self.last(h)
        logits = serialized_matmul(h, self.last.weight.t(), "output_channels", 3)
        return F.cross_entropy(logits, y)


class Plain(Net):
    """The same without a loop, so that a step can be one function."""

    def forward(self, x, y):
        return F.cross_entropy(super().forward(x), y)


def trained(kind, force, *, engine="eager", accumulation=1):
    """A model after a step, and what ran it."""
    model = kind()
    options = Options(engine, gradient_accumulation=accumulation, force=force, workers=2)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.5), options)
    step(X, Y)
    return model, step


def assert_trained(model):
    expected = Plain()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    expected.double()(X.double(), Y).backward()
    optimizer.step()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)


def choices_of(*without):
    """Some decisions, each one of its choices or left to the pass."""
    open_ = {name: st.sampled_from(c) for name, c in CHOICES.items() if name not in without}
    return st.fixed_dictionaries({}, optional=open_)


def check(force, engine):
    """Train with these decisions, fused or in micro-batches, in a loop or not."""
    fused = force.get("FuseStep") is True
    cut = {name: one for name, one in force.items() if name not in SEVERAL}
    assert_trained(trained(Plain, cut, engine=engine)[0])
    if not fused:
        assert_trained(trained(Net, cut, engine=engine)[0])
    several = {name: one for name, one in force.items() if name not in ONE_MICRO_BATCH}
    assert_trained(trained(Plain, several, engine=engine, accumulation=3)[0])


@pytest.mark.examples(12)
@given(force=choices_of())
def test_any_decisions_train_as_eager(force):
    check(force, "eager")


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.examples(10)
@pytest.mark.quick(2)
@given(force=choices_of())
def test_any_decisions_train_compiled_as_eager(force):
    check(force, "inductor")


@pytest.mark.inductor
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("library", ["torch", "onednn"])
def test_weights_are_packed_and_products_computed_as_forced(pack, library):
    model = Net().eval()
    force = {"PrepackWeights": pack, "ChooseMatmuls": library, "UnfoldConvolutions": pack}
    run = compile_inference(model, Options("inductor", force=force), own_weights=True)
    torch.testing.assert_close(run(X), model(X), rtol=1e-5, atol=1e-5)
    (recipe,) = run.executable.host_program.plan.recipes
    targets = {node.target for node in recipe.lowered.operators}
    assert bool(recipe.packed) is pack
    assert (torch.ops.aten.convolution.default in targets) is not pack
    assert (onednn.matmul in targets) is (library == "onednn")  # of convolutions, too


@pytest.mark.inductor
def test_decisions_are_forced_through_torch_compile():
    model = Net()
    options = {"engine": "inductor", "force": {"ChooseMatmuls": "onednn", "SkipCompiling": False}}
    compiled = torch.compile(copy.deepcopy(model), backend="ipu", options=options)
    torch.testing.assert_close(compiled(X), model(X), rtol=1e-5, atol=1e-5)


def test_a_forced_decision_is_what_runs():
    operators = {}
    for force in (True, False, None):
        wanted = {} if force is None else {"AccumulateMatmuls": force, "FuseLoss": force}
        _, step = trained(Net, wanted)
        host = step.executable.host_program
        functions = host.inlined.functions
        operators[force] = {node.target for f in functions for node in f.operators}
        assert ("added where they are computed" in str(host)) is (force is True)
    assert {accumulate_matmul, serialized_loss_step_} <= operators[True]
    assert not {accumulate_matmul, serialized_loss_step_} & operators[False]
    assert operators[None] == operators[False]  # all is small


@pytest.mark.parametrize(
    ("force", "said"),
    [
        ({"Fuse": True}, "no pass 'Fuse' decides anything; did you mean: Fuse"),
        ({"Outline": True}, "no pass 'Outline' decides anything"),
        ({"ChooseMatmuls": "mkl"}, "has 'mkl' for ChooseMatmuls; choose one of 'torch', 'onednn'"),
        ({"FuseStep": "yes"}, "has 'yes' for FuseStep; choose one of True, False"),
        ({"FuseStep": 1}, "it has choices by names of passes"),
    ],
)
def test_other_decisions_are_refused(force, said):
    with pytest.raises(OptionError, match=said):
        trained(Plain, force)


def test_two_options_that_disagree_are_refused():
    options = Options("eager", side_by_side=True, force={"DeferAccumulation": False})
    model = Plain()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.5), options)
    with pytest.raises(OptionError, match="another option says True"):
        step.compile(X, Y)
