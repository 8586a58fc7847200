"""Check that values kept in place of recomputed ones change no bit, and when they are kept."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import ipu_dynamo
from ipu_dynamo import (
    BeginBlock,
    Block,
    Location,
    Locations,
    Options,
    Strategy,
    compile_training,
)
from ipu_dynamo.ops.graph_queries import makes_constant, only_looks
from ipu_dynamo.ops.recurrent.onednn_lstm import onednn_lstm
from ipu_dynamo.passes.host.functions.keep_values import KeepValues
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.pipeline import form_passes, run_host_passes, writing_passes
from ipu_dynamo.program import RECOMPUTED, Program
from ipu_dynamo.testing import assert_same_bits

PIPELINE = Strategy(kind="pipelined")
EAGER = Options("eager", seed=1, strategy=PIPELINE, gradient_accumulation=8)
CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


class Layer(nn.Module):
    """A residual layer on `[rows, 16]` with a norm and dropout."""

    def __init__(self, norm):
        super().__init__()
        self.product, self.norm = nn.Linear(16, 16), norm(16)

    def forward(self, x):
        h = torch.tanh(self.norm(self.product(x)))
        return x + torch.dropout(h, 0.25, self.training)


class Deep(nn.Module):
    """Layers, and stages that begin at some of them.

    Args:
        marked: the value before the last layer of the first stage is marked.
    """

    def __init__(self, norm=nn.BatchNorm1d, cuts=(2, 4), layers=6, *, marked=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(norm) for _ in range(layers))
        self.marked = marked
        for ipu, cut in enumerate(cuts, 1):
            BeginBlock(self.layers[cut], ipu_id=ipu)

    def forward(self, x):
        x = x.half().float()
        for number, layer in enumerate(self.layers):
            if self.marked and number == 1:
                ipu_dynamo.recomputation_checkpoint(x)
            x = layer(x)
        return ipu_dynamo.identity_loss(x, "sum")


class Recurrent(nn.Module):
    """An LSTM in a stage, with operators before and after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.last = nn.LSTM(4, 4), BeginBlock(nn.Linear(4, 4), ipu_id=1)

    def forward(self, x):
        return ipu_dynamo.identity_loss(self.last(self.lstm(x.exp().unsqueeze(1))[0].tanh()), "sum")


class Own(nn.Module):
    """What a drawn layer has for itself."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def average(self, x):
        """Read a buffer before and after a write."""
        before = x - self.mean
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return before * self.mean


DRAWN = {  # layers of one width; all have the model, and tensors of their own
    "linear": lambda model, own, x: own.linear(x),
    "tied": lambda model, own, x: x @ model.tied.t(),
    "norm": lambda model, own, x: F.layer_norm(x, (4,), own.linear.bias),
    "batch_norm": lambda model, own, x: own.norm(x),
    "average": lambda model, own, x: own.average(x),
    "dropout": lambda model, own, x: F.dropout(x, 0.25),
    "noise": lambda model, own, x: x * torch.rand_like(x) + torch.randn_like(x),
    "gelu": lambda model, own, x: F.gelu(x),
    "softmax": lambda model, own, x: torch.softmax(own.linear(x), 1),
    "half": lambda model, own, x: (x.half() * 0.5).tanh().float(),
    "views": lambda model, own, x: x[:, :2].repeat(1, 2) * x.t().contiguous().t(),
    "sort": lambda model, own, x: x.sort(1).values * own.linear.bias,
    "lstm": lambda model, own, x: model.lstm(x.unsqueeze(1))[0].squeeze(1),
}


class Drawn(nn.Module):
    """Stages of drawn layers, each on an IPU of its own, on `[rows, 4]`."""

    def __init__(self, stages):
        super().__init__()
        torch.manual_seed(0)
        self.stages = stages
        self.layers = nn.ModuleList(nn.ModuleList(Own() for _ in kinds) for kinds in stages)
        self.tied, self.lstm = nn.Parameter(torch.randn(4, 4) / 2), nn.LSTM(4, 4)

    def forward(self, x):
        for ipu, kinds in enumerate(self.stages):
            with Block(f"stage{ipu}", ipu):
                x = x if ipu else x @ self.tied
                for kind, own in zip(kinds, self.layers[ipu], strict=True):
                    x = DRAWN[kind](self, own, x)
                x = x.sin()
                if ipu == len(self.stages) - 1:
                    loss = ipu_dynamo.identity_loss(x, "sum")
        return loss


def trained(model, options=EAGER, width=16):
    """The step after two calls, and all that they leave."""
    step = compile_training(model, torch.optim.Adam(model.parameters(), lr=0.1), options)
    rows = 4 * options.gradient_accumulation * options.replicas
    data = torch.Generator().manual_seed(0)
    losses = [step(torch.randn(rows, width, generator=data)) for _ in range(2)]
    return step, [*losses, *(tensor.detach() for tensor in model.state_dict().values())]


def host_of(step):
    return step.executable.host_program


def decisions(host):
    return [decision for decision in host.decisions if decision.by == KeepValues.name]


def repeated(program):
    """The operators that are repeated, views aside."""
    nodes = (node for function in program.functions for node in function.operators)
    return [node for node in nodes if node.meta.get(RECOMPUTED) and not only_looks(node)]


def decided(program, **machine):
    """What host passes make of a program."""
    written = run_host_passes(program, writing_passes(Options(), Machine()))
    return run_host_passes(written, form_passes(Options(), Machine(**machine)))


@st.composite
def pipelines(draw):
    """A model of two to four stages, also equal ones, and options of a pipeline that recomputes."""
    kinds = st.lists(st.sampled_from([*DRAWN]), min_size=1, max_size=5)
    if draw(st.booleans()):
        stages = [draw(kinds)] * draw(st.integers(2, 4))
    else:
        stages = draw(st.lists(kinds, min_size=2, max_size=4))
    options = Options(
        seed=1,
        strategy=replace(PIPELINE, schedule=draw(st.sampled_from(["grouped", "zero_bubble"]))),
        gradient_accumulation=2 * len(stages) - 1,
        replicas=draw(st.integers(1, 2)),
        recompute=draw(st.sampled_from(["stages", "all"])),
        recompute_here=False,
        outline=draw(st.sampled_from(["auto", True])),
        locations=draw(st.sampled_from([Locations(), Locations(weights=Location(off_chip=True))])),
        workers=draw(st.sampled_from([1, 3])),
    )
    return stages, options


def with_and_without(stages, options):
    """What is left if values are kept, and if they are computed again."""
    for keep in (True, False):
        options = replace(options, force={"KeepValues": keep})
        step, left = trained(Drawn(stages), options, width=4)
        assert len(decisions(host_of(step))) <= len(stages)
        yield left


@pytest.mark.examples(300)
@pytest.mark.quick(6)
@given(drawn=pipelines())
def test_drawn_pipelines_train_with_the_same_bits(drawn):
    stages, options = drawn
    assert_same_bits(*with_and_without(stages, replace(options, engine="eager")))


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.examples(20)
@given(drawn=pipelines())
def test_drawn_pipelines_agree_when_compiled(drawn):
    stages, options = drawn
    kept, again = with_and_without(stages, replace(options, engine="inductor"))
    for one, other in zip(kept, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
@pytest.mark.parametrize("schedule", ["grouped", "zero_bubble"])
def test_a_pipeline_repeats_views_casts_and_constants_only(norm, schedule):
    options = replace(EAGER, strategy=replace(PIPELINE, schedule=schedule))
    step, left = trained(Deep(norm), options)
    host = host_of(step)
    again = repeated(host.inlined)
    assert all(node.target in CASTS or makes_constant(node) for node in again)
    assert len(repeated(host.program)) > 60 > 5 > len(again)
    text = "; ".join(decision.about for decision in decisions(host))
    counts = [sum(map(int, re.findall(rf"(\d+) {what}", text))) for what in ("cast", "constant")]
    assert sum(counts) == len(again)
    assert "operators without an equal value" not in text
    assert_same_bits(left, trained(Deep(norm), replace(options, force={"KeepValues": False}))[1])


def test_decision_and_stash_have_the_bytes_that_are_kept():
    step, _ = trained(Deep(nn.LayerNorm))
    host = host_of(step)
    kept = [
        [type_ for name, type_ in stash.values if name not in dict(before.values)]
        for stash, before in zip(host.stash, host.program.stash, strict=True)
    ]
    assert [decision.count for decision in decisions(host)] == [len(kept[0]), len(kept[1])]
    for number, copies in ((0, 5), (1, 3)):
        (size, unit) = re.search(
            rf"kept, {copies} x ([\d.]+) (\w+)", decisions(host)[number].choice
        ).groups()
        assert unit == "KiB"
        assert float(size) == pytest.approx(sum(t.nbytes for t in kept[number]) / 1024, abs=0.06)
    assert str(host.program.stash[0]).startswith("stage 0 on ipu0 keeps 5 micro-batches of %")
    assert str(host.stash[0]).startswith("stage 0 on this computer keeps 5 micro-batches of %")
    assert f"  {host.stash[0]}\n" in str(replace(host, plan=None))
    assert f"  {host.program.stash[0]}\n" in str(host.program)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("options", "marked", "asked"),
    [
        ({}, False, False),
        ({"recompute": "auto"}, True, True),
        ({"recompute": "stages"}, False, True),
        ({"recompute": "all"}, False, True),
        ({"recompute_budget": 2000}, False, True),
        ({"recompute": "stages", "recompute_here": False}, False, False),
        ({"recompute": "all", "recompute_here": False}, True, False),
    ],
)
def test_the_program_says_who_asked_and_values_are_kept_unless_a_user_did(options, marked, asked):
    step, _ = trained(Deep(marked=marked), replace(EAGER, **options))
    host = host_of(step)
    assert host.program.recomputed == ("asked" if asked else "default")
    why = "as asked" if asked else "by default"
    assert f"operators again, {why}, in @backward" in host.program.short()
    assert Program.parse(host.program.text()) == host.program
    again = len(repeated(host.inlined))
    if asked:
        assert again == len(repeated(host.program)) > 0
        assert host.stash == tuple(replace(stash, here=True) for stash in host.program.stash)
        assert {d.choice for d in decisions(host)} == {"computed again"}
        assert "asked for" in decisions(host)[0].reason
    else:
        assert again < 10 < len(repeated(host.program))


def test_a_program_that_repeats_nothing_has_the_text_of_before():
    step, _ = trained(Deep(), replace(EAGER, recompute="off"))
    assert "recomputed" not in step.program.text()
    assert not decisions(host_of(step))


def test_a_text_of_before_reads_as_asked():
    step, _ = trained(Deep())
    text = step.program.text()
    older = text.replace(', recomputed="default"', "")
    assert older != text
    assert Program.parse(older) == replace(step.program, recomputed="asked")


def test_values_of_all_stages_and_replicas_fit_into_a_share_of_the_installed_memory():
    step, _ = trained(Deep(nn.LayerNorm), replace(EAGER, replicas=2))
    program = step.program
    sizes = [
        2 * stash.copies * sum(t.nbytes for n, t in stash.values if "..kept" in n)
        for stash in host_of(step).stash[:2]
    ]
    assert sizes[0] > sizes[1] > 0

    def stages(share):
        host = decided(program, memory=round(share / 0.25))
        return [decision.choice.split(",")[0] for decision in decisions(host)]

    more = 1.2  # some kept values are results of their call anyway, which these sizes leave out
    assert stages(more * sum(sizes)) == ["kept", "kept"]
    assert stages(sum(sizes) - sizes[1] / 2) == ["computed again", "kept"]
    assert stages(sizes[1] / 2) == ["computed again", "computed again"]
    reasons = [d.reason for d in decisions(decided(program, memory=100))]
    assert all("2 replicas x" in one and "0.25 of the 100 B installed" in one for one in reasons)


@pytest.mark.parametrize("keep", [True, False])
def test_a_forced_decision_is_what_runs(keep):
    options = replace(EAGER, force={"KeepValues": keep}, recompute="stages", recompute_here=keep)
    host = host_of(trained(Deep(), options)[0])
    assert (len(repeated(host.inlined)) < len(repeated(host.program))) is keep


def test_equal_stages_share_functions_where_all_calls_agree():
    """Four stages of one layer; the last one's forward pass is in one function with backward."""
    options = replace(EAGER, outline=True)
    step, left = trained(Deep(nn.LayerNorm, cuts=(3, 6, 9), layers=12), options)
    host = host_of(step)
    calls = [c for c in host.inlined.calls if c.direction == "forward"]
    assert len({c.function for c in calls}) < len(calls)
    off = replace(options, force={"KeepValues": False})
    assert_same_bits(left, trained(Deep(nn.LayerNorm, cuts=(3, 6, 9), layers=12), off)[1])


def test_layers_whose_gates_the_forward_pass_does_not_make_are_still_repeated():
    step, left = trained(Recurrent(), width=4)
    host = host_of(step)
    operators = [node.target for f in host.inlined.functions for node in f.operators]
    assert operators.count(onednn_lstm) == operators.count(torch.ops.aten.tanh.default) == 2
    assert operators.count(torch.ops.aten.exp.default) == 1
    (decision,) = decisions(host)
    assert "1 recurrent layers, whose gates the forward pass does not make" in decision.reason
    off = replace(EAGER, force={"KeepValues": False})
    assert_same_bits(left, trained(Recurrent(), off, width=4)[1])
