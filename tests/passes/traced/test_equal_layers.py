"""Check that the joint graph of a stack of equal layers is the one that AOTAutograd makes of it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import BeginBlock, Options, Strategy
from ipu_dynamo.passes.level_text import parse_level, write_level
from ipu_dynamo.passes.traced import differentiate
from ipu_dynamo.passes.traced.equal_layers.describe_arguments import layout
from ipu_dynamo.passes.traced.equal_layers.lengthen_stacks import LengthenStacks
from tests.properties.evaluate import captured

WIDTH = 6
PLAIN = Options()
STEPS = {
    "linear": lambda layer, x, h, mask: layer.linear(h),
    "norm": lambda layer, x, h, mask: F.layer_norm(h, (WIDTH,), layer.scale, layer.shift),
    "tanh": lambda layer, x, h, mask: h * torch.tanh(h),
    "dropout": lambda layer, x, h, mask: F.dropout(h, 0.25),
    "mask": lambda layer, x, h, mask: h * mask,
    "halves": lambda layer, x, h, mask: torch.cat([half + 1 for half in h.chunk(2, 1)], 1),
    "turned": lambda layer, x, h, mask: (h.t() * 2).t(),
    "residual": lambda layer, x, h, mask: x + h,
    "detached": lambda layer, x, h, mask: h + x.detach(),
    "buffer": lambda layer, x, h, mask: h * layer.factors,
    "shared": lambda layer, x, h, mask: h * layer.shared,
    "half": lambda layer, x, h, mask: h.half().float(),
}


class Layer(nn.Module):
    def __init__(self, steps, shared):
        super().__init__()
        self.steps, self.linear = steps, nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("factors", torch.rand(WIDTH))
        self.shared = shared

    def forward(self, x, mask):
        h = x
        for name in self.steps:
            h = STEPS[name](self, x, h, mask)
        return h


class Stack(nn.Module):
    """Equal layers between a first and a last one.

    Args:
        change: what makes them differ, or visible from outside.
    """

    def __init__(self, count, steps=("norm", "linear", "dropout", "residual"), change=""):
        super().__init__()
        shared = nn.Parameter(torch.ones(WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(steps, shared) for _ in range(count))
        self.norm, self.change = nn.BatchNorm1d(WIDTH), change
        if change == "frozen":
            self.layers[3].linear.weight.requires_grad_(False)
        if change == "tied":
            self.layers = nn.ModuleList([self.layers[0]] * count)
        if change == "number":
            self.layers[2].steps = ("tanh", *steps)

    def forward(self, x, y, mask):
        x = self.first(x)
        between = []
        for layer in self.layers:
            x = layer(x, mask)
            if self.change == "batch norm":
                x = self.norm(x)
            if self.change == "in place":
                x += 1
            between.append(x)
        loss = F.mse_loss(self.last(x), y)
        return (loss, between[3]) if self.change == "returned" else loss


class TwoStacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = (
            nn.ModuleList(Layer(steps, None) for _ in range(count))
            for count, steps in ((6, ("linear", "residual")), (7, ("norm", "tanh", "mask")))
        )

    def forward(self, x, y, mask):
        for layer in (*self.one, *self.two):
            x = layer(x, mask)
        return F.mse_loss(x, y)


def data():
    torch.manual_seed(0)
    return torch.randn(4, WIDTH), torch.randn(4, WIDTH), torch.ones(4, WIDTH)


def joint(model, monkeypatch, *, stacks, training=True, options=PLAIN):
    """All that is known of the joint graph, and how many operators AOTAutograd was given."""
    counts = []
    original = differentiate._Replay

    def replay(graph, training, **settings):
        counts.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return original(graph, training, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(differentiate, "_Replay", replay)
        if not stacks:
            options = replace(options, without=("ShortenStacks",))
        capture, _ = captured(model, data(), options, training=training, before="AnchorGradients")
    keys = ("stack_trace", "custom", "partitioner_tag", "is_gradient_acc", "original_aten", "desc")
    nodes = [
        (
            node.name,
            f"{node.target} {node.args} {node.kwargs}",
            layout(node.meta["val"]),
            [
                repr(node.meta.get(key))
                for key in keys
                if (key, node.op) != (keys[4], "placeholder")
            ],
        )
        for node in capture.graph.graph.nodes
    ]
    return (nodes, capture.placeholders, capture.outputs, capture.report.gradients), counts


@pytest.mark.few(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("count", [5, 8])
def test_equal_layers_are_differentiated_once(count, training, monkeypatch):
    model = Stack(count)
    lengthened, counts = joint(model, monkeypatch, stacks=True, training=training)
    plain, all_counts = joint(model, monkeypatch, stacks=False, training=training)
    assert lengthened == plain
    per_layer = 4
    assert counts == [all_counts[0] - (count - 4) * per_layer]


def test_several_stacks_are_each_differentiated_once(monkeypatch):
    model = TwoStacks()
    lengthened, counts = joint(model, monkeypatch, stacks=True)
    plain, all_counts = joint(model, monkeypatch, stacks=False)
    assert lengthened == plain
    assert counts == [all_counts[0] - 2 * 2 - 3 * 4]


def test_layers_keep_their_stages(monkeypatch):
    model = Stack(7)
    for ipu, index in enumerate((0, 2, 5)):
        BeginBlock(model.layers[index], ipu_id=ipu)
    options = Options(strategy=Strategy(kind="sharded"))
    lengthened, counts = joint(model, monkeypatch, stacks=True, options=options)
    plain, all_counts = joint(model, monkeypatch, stacks=False, options=options)
    assert lengthened == plain
    assert counts[0] < all_counts[0]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "change", ["frozen", "tied", "number", "batch norm", "in place", "returned"]
)
def test_other_layers_are_what_they_were(change, monkeypatch):
    torch.manual_seed(0)
    model = Stack(6, change=change)
    lengthened, counts = joint(model, monkeypatch, stacks=True)
    plain, all_counts = joint(model, monkeypatch, stacks=False)
    assert lengthened == plain
    assert counts[-1] == all_counts[0]  # the last time, all layers


@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5).map(tuple),
    count=st.integers(5, 7),
)
@example(steps=("residual",), count=6)  # whose backward pass is sums only
@pytest.mark.examples(60)
@pytest.mark.quick(7)
def test_drawn_layers_are_what_they_were(steps, count):
    with pytest.MonkeyPatch.context() as patch:
        model = Stack(count, steps)
        assert joint(model, patch, stacks=True)[0] == joint(model, patch, stacks=False)[0]


def lines(capture):
    """The text of a graph, but names that are free and lines of the model."""
    text = write_level(capture).splitlines()
    return [line.partition("  # ")[0] for line in text if not line.lstrip().startswith("erased ")]


@pytest.mark.parametrize("training", [True, False])
def test_shortened_stacks_are_lengthened_from_a_file(training):
    model = Stack(6)
    shortened, step = captured(model, data(), training=training, before="Differentiate")
    assert shortened.whole is not None
    read = parse_level(write_level(shortened))
    assert write_level(read) == write_level(shortened)
    joint = step(read)
    assert write_level(parse_level(write_level(joint))) == write_level(joint)
    made = LengthenStacks()(parse_level(write_level(joint)))
    expected, _ = captured(model, data(), training=training, before="AnchorGradients")
    assert made.whole is None
    assert lines(made) == lines(expected)
