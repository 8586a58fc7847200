"""Check that what is recorded with less Python is what PyTorch records."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import proxy
from torch.overrides import TorchFunctionMode

from ipu_dynamo.capture.private import tracing
from ipu_dynamo.capture.private.recording import shortened_recording
from ipu_dynamo.capture.trace import read_arguments, trace


def helper(x):
    return torch.softmax(x, 1)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.linear(x)
        return self.norm(x) * helper(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.table = nn.Sequential(Inner(), Inner()), nn.Embedding(5, 4)

    def forward(self, x, y):
        x = self.layers(x) + self.table(y)
        with torch.no_grad():
            scale = torch.tensor([1.0, 2.0, 3.0, 4.0]) * x.detach().abs().max(0).values
        left, right = F.dropout(x * scale, 0.5).chunk(2, 1)
        return {"loss": F.cross_entropy(left + right, y % 2), "x": [x.t().contiguous()]}


class Doubled(TorchFunctionMode):
    """Replaces what the user calls, and so must see no call of PyTorch's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.exp, torch.sum) else result


class Moded(nn.Module):
    def forward(self, x, y):
        with Doubled():
            return torch.exp(x).sum() + F.log_softmax(x, 1).mean() + F.mse_loss(x, x + 1)


def recorded(model, monkeypatch, *, plain, **how):
    torch.manual_seed(0)
    arguments = read_arguments(model, (torch.randn(3, 4), torch.tensor([0, 3, 1])), {})
    with monkeypatch.context() as patch:
        if plain:
            patch.setattr(tracing, "shortened_recording", nullcontext)
        capture = trace(model, arguments, **how)
    return [
        (node.name, str(node.target), str(node.args), str(node.kwargs), look(node), notes(node))
        for node in capture.graph.graph.nodes
    ]


def notes(node):
    return [str(node.meta.get(key)) for key in ("stack_trace", "tensor_meta", "ipu.scope")]


def look(node):
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return str(value)
    return str(value.shape), value.stride(), value.dtype, str(value.device), value.requires_grad


@pytest.mark.parametrize("model", [Net(), Moded()])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_records_what_pytorch_records(model, training, device, monkeypatch):
    how = {"training": training, "device": device}
    plain = recorded(model, monkeypatch, plain=True, **how)
    assert recorded(model, monkeypatch, plain=False, **how) == plain
    assert any("in forward" in str(node) for node in plain)


def test_lines_of_functions_that_are_not_called_forward_are_kept(monkeypatch):
    def model(x, y):
        return helper(x) * 2

    tracing.quote_source_of(helper)
    plain = recorded(model, monkeypatch, plain=True, training=False)
    assert recorded(model, monkeypatch, plain=False, training=False) == plain
    assert "in helper" in str(plain)
    assert "in model" in str(plain)


def test_other_threads_find_whole_stacks():
    def names():
        return [frame.name for frame in proxy.CapturedTraceback.extract().summary()]

    def forward():
        return names()

    with shortened_recording(), ThreadPoolExecutor(1) as pool:
        assert "run" in pool.submit(names).result()
        assert "names" not in forward()
        assert "forward" in forward()
    assert "names" in names()
