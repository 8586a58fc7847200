"""Check that programs which have equal stages share what was compiled for one of them."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import BeginBlock, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.runtime.engines import compiled_stages
from ipu_dynamo.tune.artifact_store import CACHE_DIR

SHARDED = Options(engine="inductor", strategy=Strategy(kind="sharded"))


class Frozen(nn.Module):
    """Two stages, of which the first has nothing to train."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 5)
        self.first.requires_grad_(False)
        BeginBlock(self.first, ipu_id=0)
        BeginBlock(self.second, ipu_id=1)

    def forward(self, x, y):
        return F.mse_loss(torch.tanh(self.second(torch.sigmoid(self.first(x)))), y)


@pytest.fixture
def origins(tmp_path, monkeypatch):
    """Calls something, and says where the code came from that it needed."""
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    compiled_stages.forget()

    def of(run):
        before = compiled_stages.origins.copy()
        run(torch.ones(3, 6), torch.ones(3, 5))
        return compiled_stages.origins - before

    yield of
    compiled_stages.forget()


def training(model):
    return compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), SHARDED)


@pytest.mark.inductor
def test_executors_of_equal_models_and_stages_share_code(origins):
    model = Frozen()
    assert origins(training(model)) == Counter(compiler=2)
    assert origins(training(Frozen())) == Counter(memory=2)
    # In training, too, the first stage returns nothing but what the second reads.
    assert origins(compile_inference(model, SHARDED)) == Counter(memory=1, compiler=1)
    assert origins(compile_inference(model, SHARDED)) == Counter(memory=2)
