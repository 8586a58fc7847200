"""Check that tensors are cut into few elements each, in order, and that nothing is left out."""

import pytest
import torch

from ipu_dynamo.runtime.engines.check import slices as module
from ipu_dynamo.runtime.engines.check.slices import slices_of


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (1, 1, 20), (20, 1), (2, 9, 3), (5, 4)])
@pytest.mark.parametrize("elements", [1, 4, 100])
def test_slices_hold_all_elements_in_order(shape, elements, monkeypatch):
    monkeypatch.setattr(module, "_ELEMENTS", elements)
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    y = torch.stack([x, -x], -1)[..., 1]  # lies otherwise
    parts = list(slices_of(x, y))
    assert all(one.numel() <= elements for one, _ in parts)
    assert torch.equal(torch.cat([one.flatten() for one, _ in parts]), x.flatten())
    assert all(torch.equal(one, -other) for one, other in parts)


def test_results_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="different shapes"):
        list(slices_of(torch.ones(3), torch.ones(1)))
