"""Check that recomputation changes what is kept, and no bit of what is computed."""

import copy
import dataclasses
import warnings
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ipu_dynamo
from ipu_dynamo import BeginBlock, Options, Strategy, compile_training, recomputation_checkpoint
from ipu_dynamo.ops.marks.markers import recomputation_checkpoint_op
from ipu_dynamo.passes.graph.liveness import peak_bytes
from ipu_dynamo.passes.joint.recomputation.recompute import Recompute, plan
from ipu_dynamo.program import RECOMPUTED
from ipu_dynamo.testing import assert_same_bits, assert_same_training, recipes
from ipu_dynamo.testing.kinds import KINDS
from tests.properties.evaluate import captured
from tests.properties.running import draw_placement, outcome

EAGER = {"engine": "eager", "seed": 1}


class Deep(nn.Module):
    """Layers with dropout on `[rows, 16]`.

    Args:
        marks: mark the input of every second layer.
        cuts: layers that begin a stage.
    """

    def __init__(self, *, marks=False, cuts=(), layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.marks = marks
        for ipu, cut in enumerate(cuts, 1):
            BeginBlock(self.layers[cut], ipu_id=ipu)

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if self.marks and index % 2 == 0:
                x = recomputation_checkpoint(x)
            x = x + torch.dropout(torch.tanh(layer(x)).sin(), 0.1, self.training)
        return ipu_dynamo.identity_loss(x, "sum")


def train(model, rows=64, **options):
    """Two steps; the program, and what it leaves behind."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, {**EAGER, **options})
    losses = [step(torch.ones(rows, 16)) for _ in range(2)]
    return step.program, [*losses, *(p.detach() for p in model.parameters())]


def again(program):
    return sum(bool(node.meta.get(RECOMPUTED)) for f in program.functions for node in f.operators)


def is_mark(node):
    return node.target is recomputation_checkpoint_op


def saved(program):
    """Results of forward calls."""
    return sum(len(call.results) for call in program.calls if call.direction == "forward")


@pytest.mark.examples(500)
@pytest.mark.quick(8)
@given(
    recipe=recipes(kinds=KINDS.keys()),
    data=st.data(),
    recompute=st.sampled_from(["stages", "all", "budget"]),
)
def test_random_models_train_with_the_same_bits(recipe, data, recompute):
    placement = draw_placement(data, recipe)
    count = placement.micro_batches(training=True)
    off = Options(
        **EAGER, strategy=placement.strategy, gradient_accumulation=count, recompute="off"
    )
    if recompute == "budget":
        on = dataclasses.replace(
            off, recompute="auto", recompute_budget=data.draw(st.integers(1, 999))
        )
    else:
        on = dataclasses.replace(off, recompute=recompute)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "recompute_budget", UserWarning)
        assert_same_bits(
            outcome(recipe, placement, on)["tensors"], outcome(recipe, placement, off)["tensors"]
        )


@pytest.mark.parametrize("marks", [False, True])
def test_one_stage_is_cut_in_two_calls_and_keeps_less(marks):
    plain, wanted = train(Deep(marks=marks))
    program, found = train(Deep(marks=marks), recompute="all")
    assert_same_bits(found, wanted)
    assert [call.direction for call in plain.calls] == ["forward_backward"]
    assert [call.direction for call in program.calls] == ["forward", "backward"]
    assert again(plain) == 0
    assert again(program) > 0
    assert "# again: test_recompute.py" in str(program)


def test_what_does_not_raise_the_peak_is_kept():
    """The last layers' backward pass comes first, when what the others keep is there anyway."""
    capture, _ = captured(Deep(marks=True), (torch.ones(64, 16),), Options(), before="Recompute")
    marks = {n.all_input_nodes[0] for n in capture.graph.graph.nodes if is_mark(n)}
    exactly = plan(capture.graph.graph, range(1), marks)
    peak = peak_bytes(capture, exactly)
    Recompute("all")(capture)
    repeated = [n for n in capture.graph.graph.nodes if n.meta.get(RECOMPUTED)]
    assert len(repeated) < 0.9 * sum(map(len, exactly.values()))
    assert peak_bytes(capture) <= peak


def test_marks_compute_nothing():
    program, found = train(Deep(marks=True))
    plain, wanted = train(Deep())
    assert_same_bits(found, wanted)
    assert [f.key for f in program.functions] == [f.key for f in plain.functions]


def test_a_pipeline_keeps_the_inputs_of_its_stages_and_what_is_marked():
    pipelined = {"strategy": Strategy(kind="pipelined"), "gradient_accumulation": 4}
    counts = {}
    results = {}
    for name, model, options in (
        ("off", Deep(cuts=[4], layers=8), {"recompute": "off"}),
        ("default", Deep(cuts=[4], layers=8), {}),
        ("marks", Deep(cuts=[4], layers=8, marks=True), {}),
        ("all", Deep(cuts=[4], layers=8), {"recompute": "all"}),
    ):
        program, results[name] = train(model, **pipelined, **options)
        counts[name] = saved(program)
        calls = [(c.stage, c.direction) for c in program.calls]
        last = [(1, "forward"), (1, "backward")] if name == "all" else [(1, "forward_backward")]
        assert calls == [(0, "forward"), *last, (0, "backward")]
    assert counts["default"] == 1  # what the next stage reads
    assert counts["marks"] == 2  # and the input of layer 2; that of layer 0 is there anyway
    assert counts["off"] > 4
    for found in results.values():
        assert_same_bits(found, results["off"])


@pytest.mark.examples(50)
@pytest.mark.quick(5)
@given(st.floats(0, 1))
def test_a_budget_is_kept_and_used(share):
    """Between the least and the most that a step can need; results are of 4 KiB each."""
    least, most = _least_and_most()
    budget = round(least + share * (most - least))
    found = _peak(budget)
    assert found <= budget
    assert budget - found <= 4 * 4096


@cache
def _least_and_most():
    """The counted peaks of all and of no recomputation."""
    return _peak(None), peak_bytes(_deep())


def _peak(budget):
    """The counted peak after the pass."""
    capture = _deep()
    Recompute("all", budget)(capture)
    return peak_bytes(capture)


def _deep():
    return copy.deepcopy(_captured())


@cache
def _captured():
    return captured(Deep(), (torch.ones(64, 16),), Options(), before="Recompute")[0]


def test_a_budget_that_is_too_small_is_a_warning():
    with pytest.warns(UserWarning, match="recompute_budget is 1000 bytes, and a micro-batch needs"):
        train(Deep(), recompute_budget=1000)


def test_buffers_are_read_as_the_forward_pass_read_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(model)
            BeginBlock(self.inner[3], ipu_id=1)

        def forward(self, x):
            return ipu_dynamo.identity_loss(self.inner(x) ** 2, "sum")

    options = Options(
        engine="eager",
        strategy=Strategy(kind="pipelined"),
        gradient_accumulation=4,
        recompute="all",
    )
    assert_same_training(Loss(), [torch.randn(32, 4)], options, steps=2)


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_trains_alike():
    _, wanted = train(Deep(layers=3))
    program, found = train(Deep(layers=3, marks=True), recompute="all", engine="inductor")
    assert again(program) > 0
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["off", "all"])
def test_a_mark_on_what_nobody_reads_changes_no_random_number(mode):
    class Model(nn.Module):
        def __init__(self, mark):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.mark = nn.Linear(3, 3), mark

        def forward(self, x):
            self.mark(x + torch.rand_like(x))
            h = self.layer(x + torch.rand_like(x))
            return ipu_dynamo.identity_loss(h * h, "sum")

    losses = []
    for mark in (recomputation_checkpoint, lambda x: x):
        model = Model(mark)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = compile_training(model, optimizer, Options("eager", recompute=mode, seed=1))
        losses.append(step(torch.ones(2, 3)))
    assert torch.equal(*losses)


@pytest.mark.parametrize("mode", ["off", "all"])
def test_a_marked_value_may_be_changed_in_place(mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            marked = recomputation_checkpoint(x)
            h = recomputation_checkpoint(self.layer(marked + 0).tanh())
            marked.sub_(1)
            return ipu_dynamo.identity_loss(h * h + marked, "sum")

    model, x = Model(), torch.ones(2, 3)
    step = compile_training(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Options("eager", recompute=mode)
    )
    loss = step(x)
    assert torch.equal(x, torch.zeros(2, 3))
    assert loss.shape == ()
