"""Check what predictions say of memory: sums, tiles, code and the verdict."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import Block, Options, Strategy
from ipu_dynamo.machine import machines
from ipu_dynamo.machine.memory import memory_of
from ipu_dynamo.machine.predict_program import predict_program
from ipu_dynamo.machine.step_costs import StepCosts
from ipu_dynamo.machine.step_time import step_time
from ipu_dynamo.machine.system import system_of
from ipu_dynamo.machine.tile_memory import fullest_step
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.liveness import IpuLiveness, LiveStep, LiveTensor
from tests.machine.test_liveness import program

BOW = machines["bow"].ipu


class Layers(nn.Module):
    """Equal layers in halves, on one IPU or several."""

    def __init__(self, count, width=64, ipus=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.ipus = ipus
        self.half()

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            with Block(f"layer {number}", number * self.ipus // len(self.layers)):
                x = layer(x).relu()
                loss = x.float().sum()
        return loss


def layers(count=4, *, ipus=1, rows=8, width=64, training=True, **options):
    """The program of equal layers."""
    strategy = Strategy("pipelined") if ipus > 1 else Strategy()
    given = Options(strategy=strategy, gradient_accumulation=2 * ipus, **options)
    x = torch.ones(rows, width, dtype=torch.float16)
    return program(Layers(count, width, ipus), (x,), given, training=training, optimizer="adam")


@pytest.mark.parametrize("ipus", [1, 2])
def test_sums_agree(ipus):
    prediction = predict_program(layers(ipus=ipus))
    for ipu in prediction.ipus:
        memory = ipu.memory
        for end in ("low", "central", "high"):
            parts = sum(getattr(category.nbytes, end) for category in memory.categories)
            assert parts == getattr(memory.total, end)
        in_calls = [
            memory.always_live.central + call.held + activations + temporary
            for call in memory.calls
            for block in [memory.blocks[call.memory_block]]
            for activations, temporary in zip(block.activations, block.temporaries, strict=True)
        ]
        assert memory.total.central in in_calls
        assert len(memory.peak.tensors) == len(set(memory.peak.tensors)) > 4
        by_category = Counter()
        for tensor in memory.peak.tensors:
            by_category[tensor.category] += tensor.nbytes
        named = {category.name: category.nbytes.central for category in memory.categories}
        assert all(named[name] == nbytes for name, nbytes in by_category.items())
        assert memory.profile.least <= memory.profile.median <= memory.profile.fullest.central


def test_lifetimes_add_up_to_the_activations_of_their_steps():
    for ipu in predict_program(layers(6, ipus=2)).ipus:
        for block in ipu.memory.blocks:
            for step, activations in enumerate(block.activations):
                live = sum(
                    life.nbytes
                    for life in block.lifetimes
                    if life.made <= step and (life.last < 0 or step <= life.last)
                )
                assert live == activations


def test_equal_layers_have_one_code():
    def code(count):
        memory = predict_program(layers(count)).ipus[0].memory
        return [c.nbytes for c in memory.categories if "code" in c.name]

    assert code(12) == code(6)
    assert all(c.low < c.central < c.high for c in code(6))


def test_the_verdict_is_that_of_the_fullest_tile():
    made = layers()
    tile = predict_program(made).verdict.tile
    words = {}
    for name, room in (("low", tile.low - 1), ("between", tile.high - 1), ("high", tile.high)):
        ipu = replace(BOW, tile_bytes=room + int(BOW.reserved_bytes))
        words[name] = predict_program(made, ipu).verdict.word
    assert words == {"low": "does not fit", "between": "tight", "high": "fits"}


def test_half_the_proportion_leaves_products_less_room():
    whole, small = (
        predict_program(layers(rows=4096, width=1024, memory_proportion=share))
        for share in (0.6, 0.05)
    )
    named = [
        {c.name: c.nbytes.central for c in p.ipus[0].memory.categories} for p in (whole, small)
    ]
    assert named[1]["temporaries"] < named[0]["temporaries"]


def test_int64_is_int32_on_the_machine():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 4)

        def forward(self, ids):
            return self.table(ids)

    made = program(Lookup(), (torch.zeros(6, 10, dtype=torch.int64),), Options(), training=False)
    (memory,), _ = predict_memory(made)
    tensors = {tensor.name: tensor.nbytes for tensor in memory.peak.tensors}
    assert tensors["ids"] == 6 * 10 * 4


def predict_memory(made):
    costs = StepCosts(made, system_of("bow"))
    step_time(costs)
    return memory_of(costs)


SIZES = st.lists(
    st.tuples(
        st.integers(0, 5000),
        st.sampled_from(["weight", "accumulator", "activation"]),
        st.booleans(),
        st.lists(st.integers(0, 4), min_size=2, max_size=2),
    ),
    max_size=8,
)


@given(sizes=SIZES, tiles=st.integers(2, 9), io_tiles=st.integers(0, 1))
def test_grains_are_dealt_round_robin(sizes, tiles, io_tiles):
    tensors = []
    for nbytes, role, io, steps in sizes:
        spans = (tuple(sorted(steps)),) if role == "activation" else ()
        type_ = TensorType(torch.uint8, (nbytes,))
        tensors.append(LiveTensor("x", type_, nbytes, role, spans=spans, io_tiles=io))
    temporaries = [3, 0, 700, 0, 1]
    steps = tuple(LiveStep(number, "x") for number in range(5))
    found = fullest_step(IpuLiveness(0, steps, tuple(tensors)), temporaries, tiles, io_tiles)
    cards, io_cards = [0] * (tiles - io_tiles), [0] * io_tiles
    place, io_place, dealt = 0, 0, []
    for tensor in tensors:
        grain = 512 if tensor.role == "weight" else 8
        hand = Counter()
        for _ in range(-(-tensor.nbytes // grain)):
            if tensor.io_tiles and io_tiles:
                hand["io", io_place % len(io_cards)] += grain
                io_place += 1
            else:
                hand["tile", place % len(cards)] += grain
                place += 1
        dealt.append(hand)
    most = []
    for step in range(5):
        total = Counter({("tile", t): temporaries[step] for t in range(len(cards))})
        total.update({("io", t): 0 for t in range(len(io_cards))})
        for tensor, hand in zip(tensors, dealt, strict=True):
            if tensor.at(step):
                total.update(hand)
        most.append(max(total.values()))
    assert found.fullest == max(most)
    assert most[found.step] == max(most)
