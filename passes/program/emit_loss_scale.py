"""Write what follows the micro-batches of a step for a loss scale that may change.

Before   parts that read the loss scale, and count elements of gradients
After    copies of the loss scale to the IPUs that update; counts brought together and summed over
         replicas; the next loss scale, when all updates are done
Keeps    the loss scale within the normal numbers of the loss's dtype, so that no start of a
         backward pass is infinite or zero.
Source   PopTorch user guide, "poptorch.options._TrainingOptions.setAutomaticLossScaling".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ipu_dynamo.capture.capture import LossScale
from ipu_dynamo.options import Options
from ipu_dynamo.program import AdjustLossScale, AllReduce, Copy, Instruction, TensorType, Variable
from ipu_dynamo.program.ir.made_names import alone, on_ipu

_NUMBER = TensorType(torch.float32, ())
_COUNT = TensorType(torch.int64, ())


@dataclass(frozen=True)
class LossScaleEnd:
    """The end of a step, as far as the loss scale goes.

    Args:
        owner: IPU that begins the backward pass.
        counters: the accumulators that count, and their IPUs.
    """

    scale: LossScale
    options: Options
    owner: int
    counters: Mapping[str, int]

    def on(self, ipu: int) -> str:
        """What `ipu` calls the loss scale."""
        return self.scale.name if ipu == self.owner else on_ipu(self.scale.name, ipu)

    def copies(self, ipus: Iterable[int]) -> list[Instruction]:
        """The copies of the loss scale to IPUs that update parameters."""
        name = self.scale.name
        return [
            Copy(name, self.on(ipu), _NUMBER, self.owner, ipu, "the loss scale")
            for ipu in ipus
            if ipu != self.owner
        ]

    def adjustment(self) -> list[Instruction]:
        """What makes the next loss scale."""
        automatic = self.options.automatic_loss_scaling
        if automatic is None:
            return []
        result: list[Instruction] = []
        local = []
        for name, ipu in self.counters.items():
            local.append(name if ipu == self.owner else on_ipu(name, self.owner))
            if ipu != self.owner:
                result.append(Copy(name, local[-1], _COUNT, ipu, self.owner, "size of gradients"))
        if self.options.replicas > 1:
            result.append(AllReduce(tuple(local), self.owner))
        limits = [torch.finfo(self.scale.dtype), torch.finfo(torch.float32)]
        micro_batches = self.options.gradient_accumulation * self.options.replicas
        several = automatic.period > 1
        adjust = AdjustLossScale(
            scale=self.scale.name,
            within=tuple(local),
            watched=self.scale.watched * micro_batches,
            share=automatic.share,
            smallest=max(limit.smallest_normal for limit in limits),
            largest=min(limit.max for limit in limits),
            ipu=self.owner,
            period=automatic.period,
            steps=self._steps if several else None,
            so_far=self._so_far if several else None,
        )
        return [*result, adjust]

    def variables(self) -> list[Variable]:
        """The loss scale, the counters, and what is kept from step to step."""
        found = [Variable(self.scale.name, _NUMBER, "loss_scale", self.owner)]
        automatic = self.options.automatic_loss_scaling
        if automatic is not None and automatic.period > 1:
            found += [
                Variable(name, _COUNT, "loss_scale", self.owner)
                for name in (self._steps, self._so_far)
            ]
        alone = self.options.replicas == 1
        return found + [
            Variable(name, _COUNT, "accumulator", ipu, alone) for name, ipu in self.counters.items()
        ]

    @property
    def _steps(self) -> str:
        return alone("loss_scale.steps")

    @property
    def _so_far(self) -> str:
        return alone("loss_scale.so_far")
