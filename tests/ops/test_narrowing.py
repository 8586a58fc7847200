"""Check that numbers which a narrower type does not hold are told of, once and by name."""

import warnings

import pytest
import torch
from torch import nn

from ipu_dynamo import Options, compile_inference
from ipu_dynamo.ops.precision.narrowing import narrowed, tell_of_lost_values

NARROW = Options(engine="eager", narrow=True)
LOST = [
    (torch.tensor([7, 2**40 + 5]), "1099511627781 arrives as 5"),
    (torch.tensor([-(2**31) - 1]), "-2147483649 arrives as 2147483647"),
    (torch.tensor([1.0, 1e300], dtype=torch.float64), "1e[+]300 arrives as inf"),
    (torch.tensor([-1e5], dtype=torch.bfloat16), "-99840.0 arrives as -inf"),
    (torch.tensor([1e300 + 1j], dtype=torch.complex128), "arrives as"),
]
HELD = [
    torch.tensor([2**31 - 1, -(2**31)]),
    torch.tensor([0.1, 3e38, float("inf"), -float("inf"), float("nan")], dtype=torch.float64),
    torch.tensor([65280.0, float("nan")], dtype=torch.bfloat16),
    torch.tensor([1.0 + 2j], dtype=torch.complex128),
    torch.empty(0, dtype=torch.int64),
    torch.tensor([1e30]),
]


@pytest.mark.parametrize(("tensor", "words"), LOST, ids=str)
def test_lost_numbers_are_told_of(tensor, words):
    with pytest.warns(UserWarning, match=f"input x has numbers outside of .*1 of.*{words}"):
        assert tell_of_lost_values("input x", tensor, narrowed(tensor))


@pytest.mark.parametrize("tensor", HELD, ids=str)
def test_rounding_and_infinities_are_no_loss(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not tell_of_lost_values("input x", tensor, narrowed(tensor))


def test_each_input_is_told_of_once():
    run = compile_inference(lambda ids, scale: (ids + 0, scale * 2), NARROW)
    small = (torch.tensor([1]), torch.tensor([1.0]).double())
    large = (torch.tensor([2**40]), torch.tensor([1e300], dtype=torch.float64))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(*small)
        run(large[0], small[1])
        run(*large)
        run(*large)
    texts = [str(one.message) for one in told]
    assert [text.split(" has ")[0] for text in texts] == ["input ids", "input scale"]


def test_buffers_and_constants_are_told_of_by_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("offset", torch.tensor([2**40]))

        def forward(self, x):
            return x + self.offset

    run = compile_inference(Model(), Options(engine="eager", narrow=True), own_weights=True)
    with pytest.warns(UserWarning, match="constant offset has numbers outside of int32"):
        run(torch.tensor([1]))
