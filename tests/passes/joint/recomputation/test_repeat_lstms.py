"""Check that LSTM layers run again where forward and backward are two programs."""

import copy

import pytest
import torch
import torch._dynamo
from torch import nn

import ipu_dynamo
from ipu_dynamo.ops.recurrent.lstm import lstm, lstm_backward
from ipu_dynamo.passes.joint.recomputation import repeat_lstms
from ipu_dynamo.torch_compile.backend import ipu


class Model(nn.Module):
    def __init__(self, proj_size):
        super().__init__()
        self.layers = nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=proj_size)
        self.last = nn.Linear(2 * (proj_size or 4), 1)

    def forward(self, x):
        return self.last(self.layers(x.tanh())[0])


@pytest.mark.parametrize(
    ("proj_size", "most", "again"), [(0, 2 * 16 * 12, 4), (0, 2 * 16 * 12 - 1, 2), (2, 999, 0)]
)
def test_backward_reads_gates_of_its_own(proj_size, most, again, monkeypatch):
    """The larger layer, the second, has 2 rows, 16 gates, and 8 inputs beside 4 outputs."""
    monkeypatch.setattr(repeat_lstms, "MOST_REPEATED", most)
    torch.manual_seed(0)
    model, x = Model(proj_size), torch.randn(5, 2, 3)
    plain = copy.deepcopy(model)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(model, backend=ipu, fullgraph=True, options={"engine": "eager"})
        for call in (compiled, plain):
            call(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    forward, backward = ipu_dynamo.programs()[-2:]
    assert targets(backward).count(lstm) == again
    assert targets(backward).count(lstm_backward) == 4
    saves = [n.args[-1] for f in forward.functions for n in f.operators if n.target is lstm]
    assert saves.count(False) == again


def targets(program):
    nodes = [node for function in program.functions for node in function.operators]
    return [node.target for node in nodes if node.target in (lstm, lstm_backward)]
