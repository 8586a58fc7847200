"""Make the inputs of a call instead of reading them, and return zeros as its results.

Source: PopTorch user guide, "poptorch.Options.enableSyntheticData".
"""

import torch
from torch import Tensor

from ipu_dynamo.program import Program
from ipu_dynamo.runtime.execute.host_io.batching import Batching

_SEED = 0  # not torch's generator: a call should not change the user's draws


def synthetic_inputs(
    program: Program, batching: Batching, device: torch.device
) -> dict[str, Tensor]:
    """A tensor for every input from the host: normal numbers, or zeros if it has no fractions,
    since these may be indices that have to be in range."""
    generator = torch.Generator().manual_seed(_SEED)
    inputs = {}
    for stream in program.inputs:
        if stream.source != "host":
            continue
        shape, dtype = stream.type.shape, stream.type.dtype
        full = (batching.splits * shape[0], *shape[1:]) if shape else ()
        if dtype.is_floating_point:
            values = torch.randn(full, generator=generator)
        else:
            values = torch.zeros(full)
        inputs[stream.name] = values.to(device, dtype)
    return inputs


def without_contents(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the results of a call by zeros."""
    return {name: torch.zeros_like(value) for name, value in results.items()}
