"""Check what operators cost: figures that formulas give by hand, and bounds for all of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo import operator_cost
from ipu_dynamo.machine import machines
from ipu_dynamo.machine.cost import COLUMNS

NAMES = st.sampled_from(["mk1", "mk2", "bow", "c600"])
REDUCED = 6 * (20 + 5) + 300 + 1600 + 4 * 240**0.5 / (4 * 0.85) + 150 + 240**0.5 / 2
SIZES = st.integers(1, 300) | st.sampled_from([512, 768, 1024, 4096])
FLOATS = st.sampled_from(["f16", "f32"])


def received(nbytes):
    """Cycles in which all tiles of a Bow IPU receive so many bytes."""
    return nbytes / (1472 * 4 * 0.85) + 150


def test_triad_reaches_the_measured_bandwidth():
    array = "f32[67108864]"
    cost = operator_cost("aten.add.Tensor", [array, array], "mk2", in_place=True)
    seconds = cost.cycles / machines["mk2"].ipu.clock
    assert 3 * 4 * 2**26 / seconds / 1e12 == pytest.approx(46.55, rel=0.1)
    assert cost.in_place
    assert cost.compute < operator_cost("aten.add.Tensor", [array, array], "mk2").compute


@pytest.mark.parametrize(
    ("name", "types", "cycles"),
    [
        # 6 workers * (20 + c * vectors of each worker) + 20 + 1600
        ("aten.exp.default", ["f16[1472,240]"], 6 * (20 + 4 * 10) + 1620),
        ("aten.exp.default", ["f32[1472,240]"], 6 * (20 + 6 * 20) + 1620),
        ("aten.mul.Tensor", ["f16[1472,240]", "f16[1472,240]"], 6 * (20 + 2 * 10) + 1620),
        # and an exchange of 2 B * 1472, spread over the tiles, for what is broadcast
        (
            "aten.mul.Tensor",
            ["f16[1472,240]", "f16[1472,1]"],
            6 * (20 + 2 * 10) + 1620 + 2 / (4 * 0.85) + 150,
        ),
        # a pass over 8 halves a cycle, and partial sums of 240 elements
        (
            "aten.sum.dim_IntList",
            ["f16[1472,240]", [1]],
            REDUCED,
        ),
        # two reductions, two passes of arithmetic and one of exponentials
        (
            "aten._softmax.default",
            ["f16[1472,240]", 1, False],
            2 * REDUCED + 2 * (6 * (20 + 2 * 10) + 1620) + 6 * (20 + 4 * 10) + 1620,
        ),
        # two reductions and a pass; backward one and a half times that
        (
            "aten.native_layer_norm.default",
            ["f16[1472,240]", [240], None, None, 1e-5],
            2 * REDUCED + 6 * (20 + 2 * 10) + 1620,
        ),
        # cut by rows: one row here, 127 elsewhere; indices to all tiles, rows sent twice
        (
            "aten.embedding.default",
            ["f16[1000,64]", "i64[128]"],
            6 * (30 + 19 + 64 + 8 * 127) + 1600 + received(4 * 128 * 1472) + 2 * received(2**14),
        ),
        # 8 B a cycle where the last dimension is aligned, 5.15 cycles a byte where it is not
        (
            "aten.cat.default",
            [["f16[1472,8]", "f16[1472,3]"], 1],
            1600 + 16 / 8 + 6 * 5.15 + received(22 * 1472),
        ),
        # windows of 2 x 2 share nothing
        (
            "aten.avg_pool2d.default",
            ["f16[1472,10,48,2]", [2, 2]],
            6 * (20 + 2 * 4 * 10) + 1620 + received(0),
        ),
    ],
)
def test_cycles_are_those_of_the_formula(name, types, cycles):
    assert operator_cost(name, types, "bow").cycles == pytest.approx(cycles)


CALLS = {
    "aten.mm.default": lambda m, n, t: [f"{t}[{m},{n}]", f"{t}[{n},{m}]"],
    "aten.bmm.default": lambda m, n, t: [f"{t}[12,{m},{n}]", f"{t}[12,{n},{m}]"],
    "aten.addmm.default": lambda m, n, t: [f"{t}[{m}]", f"{t}[{m},{n}]", f"{t}[{n},{m}]"],
    "aten.convolution.default": lambda m, n, t: [
        *(f"{t}[2,{n},9,9]", f"{t}[{m},{n},3,3]", f"{t}[{m}]"),
        *([2, 2], [1, 1], [1, 1], False, [0, 0], 1),
    ],
    "aten.convolution_backward.default": lambda m, n, t: [
        *(f"{t}[2,{m},7,7]", f"{t}[2,{m},9,9]", f"{t}[{m},1,3,3]", [m]),
        *([1, 1], [0, 0], [1, 1], False, [0, 0], m, [True, True, True]),
    ],
    "aten.add.Tensor": lambda m, n, t: [f"{t}[{m},{n}]", f"{t}[{m},{n}]"],
    "aten.where.self": lambda m, n, t: [f"b8[{m},{n}]", f"{t}[{m},{n}]", f"{t}[{m},{n}]"],
    "aten.tanh.default": lambda m, n, t: [f"{t}[{m},{n}]"],
    "aten.gelu.default": lambda m, n, t: [f"{t}[{m},{n}]"],
    "aten.gt.Scalar": lambda m, n, t: [f"{t}[{m},{n}]", 0],
    "aten.sum.dim_IntList": lambda m, n, t: [f"{t}[{m},{n}]", [0]],
    "aten.amax.default": lambda m, n, t: [f"{t}[{m},{n},1]", [2]],
    "aten._softmax.default": lambda m, n, t: [f"{t}[{m},{n}]", 1, False],
    "aten._log_softmax_backward_data.default": lambda m, n, t: [
        *(f"{t}[{m},{n}]", f"{t}[{m},{n}]", 1, torch.float16)
    ],
    "aten.native_layer_norm.default": lambda m, n, t: [f"{t}[{m},{n}]", [n], None, None, 1e-5],
    "aten.native_batch_norm.default": lambda m, n, t: [
        *(f"{t}[{m},{n},3,3]", f"{t}[{n}]", f"{t}[{n}]", f"{t}[{n}]", f"{t}[{n}]", False, 0.1, 1e-5)
    ],
    "aten.embedding.default": lambda m, n, t: [f"{t}[{m},{n}]", "i64[4,128]"],
    "aten.embedding_dense_backward.default": lambda m, n, t: [
        *(f"{t}[4,128,{n}]", "i64[4,128]", m, -1, False)
    ],
    "aten.gather.default": lambda m, n, t: [f"{t}[{m},{n}]", 1, f"i64[{m},1]"],
    "aten.index.Tensor": lambda m, n, t: [f"{t}[{m},{n}]", [None, "i64[9]"]],
    "aten.index_put.default": lambda m, n, t: [*(f"{t}[{m},{n}]", ["i64[9]"], f"{t}[9,{n}]", True)],
    "aten.nll_loss_forward.default": lambda m, n, t: [f"{t}[{m},{n}]", f"i64[{m}]", None, 1, -100],
    "aten.nll_loss_backward.default": lambda m, n, t: [
        *(f"{t}[]", f"{t}[{m},{n}]", f"i64[{m}]", None, 1, -100, f"{t}[]")
    ],
    "aten.cat.default": lambda m, n, t: [[f"{t}[{m},{n}]", f"{t}[{m},3]"], 1],
    "aten.constant_pad_nd.default": lambda m, n, t: [f"{t}[{m},{n}]", [1, 1], 0.0],
    "aten.slice_backward.default": lambda m, n, t: [f"{t}[{m},{n}]", [2 * m, n], 0, 0, m, 1],
    "aten.max_pool2d_with_indices.default": lambda m, n, t: [
        *(f"{t}[2,{m},{n + 2},9]", [3, 3], [2, 2], [1, 1])
    ],
    "aten.avg_pool2d_backward.default": lambda m, n, t: [
        *(f"{t}[2,{m},{n},4]", f"{t}[2,{m},{2 * n},8]", [2, 2], [2, 2], [0, 0], False, True, None)
    ],
    "aten._scaled_dot_product_flash_attention_for_cpu.default": lambda m, n, t: [
        *(f"{t}[2,3,{m},{n}]", f"{t}[2,3,40,{n}]", f"{t}[2,3,40,{n}]", 0.1, True)
    ],
    "ipu.lstm.default": lambda m, n, t: [
        *(f"{t}[5,{m},8]", f"{t}[{m},{n}]", f"{t}[{m},{n}]", f"{t}[{4 * n},8]"),
        *(f"{t}[{4 * n},{n}]", f"{t}[{4 * n}]", f"{t}[{4 * n}]", None, None, False, True),
    ],
    "ipu.rnn_backward.default": lambda m, n, t: [
        *(f"{t}[5,{m},{n}]", f"{t}[{m},{n}]", f"{t}[5,{m},8]", f"{t}[{m},{n}]", f"{t}[{n},8]"),
        *(f"{t}[{n},{n}]", None, f"{t}[5,{m},{n}]", "tanh", False, True, True),
    ],
    "ipu.serialized_loss.default": lambda m, n, t: [
        *(f"{t}[{m},64]", f"{t}[64,{n}]", f"i64[{m}]", 1, -100, "output_channels", 4)
    ],
    "ipu.serialized_loss_backward.default": lambda m, n, t: [
        *(f"{t}[]", f"{t}[{m},64]", f"{t}[64,{n}]", f"i64[{m}]", "f32[]", f"f32[{m}]"),
        *(1, -100, "input_channels", 4, False),
    ],
    "aten.sort.default": lambda m, n, t: [f"{t}[{m},{n}]", -1],
    "aten.topk.default": lambda m, n, t: [f"{t}[{m},{n}]", 1],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.quick(8)
@given(m=SIZES, n=SIZES, dtype=FLOATS, machine=NAMES, partials=st.sampled_from(["float", "half"]))
def test_an_operator_is_no_faster_than_its_bounds(name, m, n, dtype, machine, partials):
    cost = operator_cost(name, CALLS[name](m, n, dtype), machine, partials=partials)
    assert cost.known
    assert cost.cycles >= cost.bounds.largest > 0
    assert set(cost.marks) >= {column for column in COLUMNS if getattr(cost, column)}


Q, KV, ROWS, SEED = "f16[2,3,64,32]", "f16[2,3,40,32]", "f32[2,3,64]", "i64[]"
SAVED = [Q, Q, KV, KV, Q, ROWS]  # gradient, query, key, value, result, logarithms of sums
ATTENTIONS = {
    "forward": [
        ("_scaled_dot_product_flash_attention_for_cpu", [Q, KV, KV, 0.0, True]),
        ("_scaled_dot_product_efficient_attention", [Q, KV, KV, None, True, 0.0, True]),
        ("_scaled_dot_product_flash_attention", [Q, KV, KV, 0.0, True]),
    ],
    "backward": [
        ("_scaled_dot_product_flash_attention_for_cpu_backward", [*SAVED, 0.0, True]),
        (
            "_scaled_dot_product_flash_attention_backward",
            [*SAVED, "i32[1]", "i32[1]", 64, 40, 0.0, True, SEED, SEED],
        ),
    ],
}


@pytest.mark.parametrize("direction", ATTENTIONS)
def test_attention_costs_the_same_whatever_the_device(direction):
    first, *others = (
        operator_cost(f"aten.{name}.default", types) for name, types in ATTENTIONS[direction]
    )
    assert first.known
    assert len(first.parts) == {"forward": 5, "backward": 10}[direction]
    assert first.cycles == pytest.approx(sum(cost.cycles for _, cost in first.parts))
    for other in others:
        assert (other.cycles, other.temporary, other.parts) == (
            first.cycles,
            first.temporary,
            first.parts,
        )


@given(m=SIZES, n=SIZES, dtype=FLOATS, machine=NAMES)
def test_an_operator_without_a_formula_is_a_guess(m, n, dtype, machine):
    cost = operator_cost("aten.erfinv.default", [f"{dtype}[{m},{n}]"], machine)
    assert not cost.known
    assert cost.marks["compute"] == "M"
    assert cost.cycles >= cost.bounds.largest > 0


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("aten.t.default", ["f16[8,4]"]),
        ("aten.clone.default", ["f16[8,4]"]),
        ("aten.full_like.default", ["f16[8,4]", 1]),
    ],
)
def test_views_dense_copies_and_filled_tensors_cost_nothing(name, types):
    assert operator_cost(name, types, "bow").cycles == 0


@pytest.mark.parametrize("types", [["f16[8,4]"], ["f16[8,4]", "f16[8,4]"]])
def test_arguments_that_an_operator_does_not_take_are_refused(types):
    with pytest.raises(ValueError, match=r"aten.mm.default"):
        operator_cost("aten.mm.default", types, "bow")


def test_a_machine_without_a_name_is_refused_with_the_names_that_exist():
    with pytest.raises(ValueError, match="bow-pod16"):
        operator_cost("aten.exp.default", ["f16[8]"], "mk9")
