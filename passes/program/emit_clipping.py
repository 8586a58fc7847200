"""Write what clips a step's gradients, once they are complete: after all sums over replicas.

Before   a rule, and the gradients that each IPU updates by
After    norms on every IPU, copied to the first one; the number that updates divide by, copied
         back. Limits for single elements need no norm
Keeps    the gradients, as `ClipFactor` tells updates what to divide them by; `ClipValues` limits
         them in place.
Source   torch.nn.utils.clip_grad; PopTorch user guide, `max_grad_norm`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ipu_dynamo.program import (
    Clip,
    ClipFactor,
    ClipGradValue,
    ClipValues,
    Copy,
    GradientNorm,
    Instruction,
    TensorType,
)
from ipu_dynamo.program.ir.made_names import alone, on_ipu

_FACTOR = alone("clip.factor")


@dataclass(frozen=True, slots=True)
class Clipping:
    """What clips, and what updates divide by.

    Args:
        factor: by IPU, the name of the number that its gradients are divided by.
    """

    instructions: tuple[Instruction, ...] = ()
    factor: Mapping[int, str] = field(default_factory=dict)


def clipping(
    rule: Clip | None,
    gradients: Mapping[int, Mapping[str, str]],
    types: Mapping[str, TensorType],
    divisor: float,
    loss_scale: Mapping[int, str],
) -> Clipping:
    """What `rule` takes.

    Args:
        gradients: that each IPU updates by, by parameter.
        types: of the gradients.
        divisor, loss_scale: what they are divided by; the scale is known to each IPU by its name.
    """
    if rule is None or not gradients:
        return Clipping()
    ipus = sorted(gradients)
    if isinstance(rule, ClipGradValue):
        return Clipping(
            tuple(
                ClipValues(
                    tuple(gradients[ipu]),
                    tuple(gradients[ipu].values()),
                    rule.clip_value,
                    divisor,
                    ipu,
                    loss_scale.get(ipu),
                )
                for ipu in ipus
            )
        )
    every = [name for own in gradients.values() for name in own.values()]
    wide = any(types[name].dtype == torch.float64 for name in every)
    number = TensorType(torch.float64 if wide else torch.float32, ())
    home, norms = ipus[0], []
    instructions: list[Instruction] = []
    for ipu in ipus:
        name = alone(f"clip.norm.ipu{ipu}")
        parameters, own = tuple(gradients[ipu]), tuple(gradients[ipu].values())
        scale, p = loss_scale.get(ipu), rule.norm_type
        instructions.append(GradientNorm(parameters, own, name, number, p, divisor, ipu, scale))
        norms.append(name if ipu == home else on_ipu(name, home))
        if ipu != home:
            instructions.append(Copy(name, norms[-1], number, ipu, home, "norm of gradients"))
    instructions.append(ClipFactor(rule, tuple(norms), _FACTOR, number, home))
    factor = {ipu: _FACTOR if ipu == home else on_ipu(_FACTOR, ipu) for ipu in ipus}
    instructions += [
        Copy(_FACTOR, factor[ipu], number, home, ipu, "clipping of gradients") for ipu in ipus[1:]
    ]
    return Clipping(tuple(instructions), factor)
