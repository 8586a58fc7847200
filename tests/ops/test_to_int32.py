"""Check that 64-bit integers go into 32 bits, or are refused."""

import pytest
import torch

from ipu_dynamo.ops.library.to_int32 import to_int32


@pytest.mark.parametrize("values", [[], [0, -1, 2**31 - 1, -(2**31)]])
def test_values_that_fit_stay_what_they_are(values):
    x = torch.tensor(values, dtype=torch.int64)
    result = to_int32(x, "it")
    assert result.dtype == torch.int32
    assert result.tolist() == values


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63 - 1])
def test_values_that_do_not_fit_are_named(value):
    with pytest.raises(ValueError, match=rf"input 'x' has the value {value}.*int32"):
        to_int32(torch.tensor([[0, value]]), "input 'x'")


def test_shapes_are_known_without_values():
    torch.library.opcheck(to_int32, (torch.arange(6).view(2, 3), "it"))
