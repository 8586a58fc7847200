"""Train by PopTorch on the replicas of this instance, and show a digest of the weights.

Usage: train.py [FILE]

With a file the results, weights and states are saved. Alone it trains on four replicas. The rows of
each replica are the same in every division into instances. The last instance validates by itself,
unless processes share the IPUs of a replica.
"""

import hashlib
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

import popdist
import popdist.poptorch
import poptorch

ITERATIONS, ACCUMULATION, REPLICAS, ROWS = 2, 4, 4, 3


class Net(nn.Module):
    """Two layers in a pipeline of two stages. In training replicas exchange the values between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(5, 7), ipu_id=0)
        self.norm = nn.BatchNorm1d(7)
        self.last = poptorch.BeginBlock(nn.Linear(7, 3), ipu_id=1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.2, self.training)
        if y is None:
            return self.last(hidden)
        name, domain = "ReplicatedAllReduceTP", "ai.graphcore"
        (total,) = poptorch.custom_op([hidden], name, domain, 1, [hidden], {"backwards": 0})
        scores = self.last(total / REPLICAS)
        return scores, nn.functional.cross_entropy(scores, y)


def rows_of_instance(whole: Tensor) -> Tensor:
    """The rows of this instance's replicas."""
    first, count = popdist.getReplicaIndexOffset(), options.replication_factor
    parts = whole.unflatten(0, (-1, REPLICAS, ROWS))
    return parts[:, first : first + count].flatten(0, 2)


popdist.init()
options = popdist.poptorch.Options()
if not popdist.isPopdistEnvSet():
    options = poptorch.Options().replicationFactor(REPLICAS)
options.deviceIterations(ITERATIONS).outputMode(poptorch.OutputMode.All)
options.Training.gradientAccumulation(ACCUMULATION)
options.randomSeed(3)
options.showCompilationProgressBar(False)

torch.manual_seed(popdist.getInstanceIndex())  # instance 0's weights are those of all
model = Net()
optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)
training = poptorch.trainingModel(model, options, optimizer)
data = torch.Generator().manual_seed(1)
rows = ITERATIONS * ACCUMULATION * REPLICAS * ROWS
results = []
for _ in range(3):
    x = torch.randn(rows, 5, generator=data)
    y = torch.randint(3, (rows,), generator=data)
    results.append(training(rows_of_instance(x), rows_of_instance(y)))

state = {name: tensor.clone() for name, tensor in training.state_dict().items()}
saved = {"results": results, "model": state, "optimizer": optimizer.state_dict()}
columns = int(os.environ.get("IPU_DYNAMO_MESH", "1x1").partition("x")[2])
if columns > 1 or popdist.getInstanceIndex() == popdist.getNumInstances() - 1:
    validating = options.clone()
    validating.Training.gradientAccumulation(1)
    validation = poptorch.inferenceModel(model.eval(), validating)
    x = torch.randn(ITERATIONS * REPLICAS * ROWS, 5, generator=data)
    saved["scores"] = validation(rows_of_instance(x))
if sys.argv[1:]:
    torch.save(saved, f"{sys.argv[1]}.{os.environ.get('RANK', '0')}")
weights = b"".join(state[name].numpy().tobytes() for name, _ in model.named_parameters())
digest = hashlib.sha256(weights).hexdigest()[:16]
print(f"instance {popdist.getInstanceIndex()}: weights {digest}", flush=True)
