"""Write the clipping of a step's gradients, once they are complete: after all sums over replicas.

Before   all_reduce %a..grad;  update (%a by %a..grad)  on ipu0;  and the same of %b on ipu1
After    all sums; norms on every IPU, copied to the first one; the number that updates divide by,
         copied back; then all updates, which divide by it. Limits for single elements need no norm,
         and only come before the updates
Keeps    the gradients, as `ClipFactor` tells updates what to divide them by; `ClipValues` limits
         them in place.
Source   torch.nn.utils.clip_grad; PopTorch user guide, `max_grad_norm`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import (
    AllReduce,
    Clip,
    ClipFactor,
    ClipGradValue,
    ClipValues,
    Copy,
    GradientNorm,
    JointUpdate,
    Program,
    TensorType,
    Update,
    UpdatePart,
)
from ipu_dynamo.program.ir.instructions import Plain
from ipu_dynamo.program.ir.made_names import alone, on_ipu
from ipu_dynamo.program.schedule.sections import sections, with_sections

_FACTOR = alone("clip.factor")


class ClipGradients(Pass):
    """The pass. `clip` is the optimiser's rule; None: nothing is clipped."""

    level = "program"
    needed = "the optimiser says so"

    clip: Clip | None = None

    def applies(self, program: Program, contents: Contents) -> bool:
        return self.clip is not None

    def __call__(self, program: Program) -> Program:
        after = sections(program).after
        updates = [step for step in after if isinstance(step, Update)]
        if self.clip is None or not updates:
            return program
        clips, factors = plan(self.clip, updates, _types(program, after))
        places = [place for place, step in enumerate(after) if isinstance(step, _UPDATING)]
        first, last = places[0], places[-1] + 1
        sums = [step for step in after[first:last] if isinstance(step, AllReduce)]
        rest = [step for step in after[first:last] if not isinstance(step, AllReduce)]
        clipped = [
            replace(step, clip=factors.get(step.ipu))
            if isinstance(step, Update | UpdatePart)
            else step
            for step in rest
        ]
        return with_sections(
            program, after=[*after[:first], *sums, *clips, *clipped, *after[last:]]
        )


_UPDATING = Update | UpdatePart | JointUpdate


def _types(program: Program, after: Sequence[Plain]) -> dict[str, TensorType]:
    """The types of gradients, by name."""
    types = {variable.name: variable.type for variable in program.variables}
    return types | {step.result: step.type for step in after if isinstance(step, Copy)}


def plan(
    rule: Clip, updates: Sequence[Update], types: Mapping[str, TensorType]
) -> tuple[list[Plain], dict[int, str]]:
    """The instructions that clip, and the number by which each IPU divides its gradients.

    Args:
        types: of the gradients.
    """
    gradients: dict[int, dict[str, str]] = {}  # that each IPU updates by, by parameter
    for update in updates:
        own = dict(zip(update.parameters, update.gradients, strict=True))
        gradients.setdefault(update.ipu, {}).update(own)
    scales = {update.ipu: update.loss_scale for update in updates}
    divisor, ipus = updates[0].divisor, sorted(gradients)
    if isinstance(rule, ClipGradValue):
        limits: list[Plain] = [
            ClipValues(
                tuple(gradients[ipu]),
                tuple(gradients[ipu].values()),
                rule.clip_value,
                divisor,
                ipu,
                scales[ipu],
            )
            for ipu in ipus
        ]
        return limits, {}
    every = [name for own in gradients.values() for name in own.values()]
    wide = any(types[name].dtype == torch.float64 for name in every)
    number = TensorType(torch.float64 if wide else torch.float32, ())
    owner, norms = ipus[0], []
    clips: list[Plain] = []
    for ipu in ipus:
        name = alone(f"clip.norm.ipu{ipu}")
        parameters, own_gradients = tuple(gradients[ipu]), tuple(gradients[ipu].values())
        clips.append(
            GradientNorm(
                parameters,
                own_gradients,
                name,
                number,
                rule.norm_type,
                divisor,
                ipu,
                scales[ipu],
            )
        )
        norms.append(name if ipu == owner else on_ipu(name, owner))
        if ipu != owner:
            clips.append(Copy(name, norms[-1], number, ipu, owner, "norm of gradients"))
    clips.append(ClipFactor(rule, tuple(norms), _FACTOR, number, owner))
    factors = {ipu: _FACTOR if ipu == owner else on_ipu(_FACTOR, ipu) for ipu in ipus}
    clips += [
        Copy(_FACTOR, factors[ipu], number, owner, ipu, "clipping of gradients") for ipu in ipus[1:]
    ]
    return clips, factors
