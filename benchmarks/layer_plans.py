"""Time the plan of a model's layers over IPUs, once what operators take is known."""

import time
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ipu_dynamo.optimum import IPUConfig, plan_layers
from ipu_dynamo.optimum.placement import traced_layers

LAYERS, WIDTH, IPUS = 48, 64, 8


class Layers(nn.Module):
    """An encoder of equal layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().log_softmax(-1).mean()


def seconds() -> dict[str, float]:
    """What planning takes, on the clock and of the processor, without the measurement."""
    model, sample = Layers(), (torch.randint(256, (2, 16)),)
    config = IPUConfig(ipus_per_replica=IPUS)
    with patch.object(traced_layers, "measured_costs", _equal_costs):
        plan_layers(model, sample, IPUS, config)  # imports
        start, cpu = time.perf_counter(), time.process_time()
        plan = plan_layers(model, sample, IPUS, config)
        spent = {"clock": time.perf_counter() - start, "processor": time.process_time() - cpu}
    assert sum(plan.layers_per_ipu) == LAYERS
    return {f"{LAYERS} layers on {IPUS} IPUs, {name}": value for name, value in spent.items()}


def _equal_costs(capture, options, *, loss):  # type: ignore[no-untyped-def]
    """Every operator takes as long, backward twice."""
    both = (1e-5, 2e-5) if capture.training else (1e-5, 0.0)
    return (both,) * sum(map(traced_layers.computes, capture.graph.graph.nodes))
