"""Check what libraries reach through `poptorch._impl`."""

import torch

import poptorch
from poptorch import _impl
from tests.poptorch.executor.models import Weighted


def test_tracing_is_known():
    seen = []

    def forward(x):
        seen.append(_impl.isDispatchTracing())
        return x + 1

    poptorch.inferenceModel(forward)(torch.ones(1))
    assert seen
    assert all(seen)
    assert not _impl.isDispatchTracing()


def test_one_object_is_unwrapped():
    model = Weighted()
    executor = poptorch.trainingModel(model)
    executor(torch.ones(1))
    assert _impl.isWrapped(model)
    assert _impl.unwrapIfWrapped(model) is model
    assert type(model) is Weighted
    assert _impl.isWrapped(model.w)
    assert _impl.unwrapIfWrapped(model.w) is model.w
    assert type(model.w) is torch.nn.Parameter
    executor.destroy()
    assert torch.equal(model.w.detach(), torch.tensor([0.99]))


def test_what_is_not_wrapped_stays():
    model = Weighted()
    assert _impl.unwrapIfWrapped(model) is model
    assert not _impl.isWrapped(model)
    assert type(model) is Weighted
