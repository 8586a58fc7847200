"""Check the instructions that clip gradients."""

from dataclasses import dataclass

from ipu_dynamo.program.ir.clipping import ClipFactor, ClipValues, GradientNorm
from ipu_dynamo.program.ir.verify.residence import Residence


@dataclass
class ClipChecks:
    """Follows the instructions that clip, at the end of a step.

    Args:
        has: what is where.
    """

    has: Residence

    def check(self, instruction: GradientNorm | ClipFactor | ClipValues) -> None:
        """Check one, and note what it makes.

        Raises:
            ValueError: what is wrong with it.
        """
        match instruction:
            case GradientNorm(norm_type=norm_type):
                self._gradients(instruction)
                if not norm_type > 0:
                    raise ValueError(f"there is no {norm_type:g}-norm")
                self._number(instruction)
            case ClipFactor(norms=norms, ipu=ipu):
                if not norms:
                    raise ValueError("there is no norm to clip by")
                for name in norms:
                    if self.has.at(name, ipu) != instruction.type:
                        raise ValueError(f"%{name} is {self.has.at(name, ipu)}, no norm")
                self._number(instruction)
            case ClipValues():
                self._gradients(instruction)

    def _gradients(self, clip: GradientNorm | ClipValues) -> None:
        if len(clip.parameters) != len(clip.gradients):
            raise ValueError(f"{len(clip.parameters)} parameters, {len(clip.gradients)} gradients")
        if clip.divisor == 0:
            raise ValueError("gradients are divided by 0")
        if clip.loss_scale is not None:
            self.has.at(clip.loss_scale, clip.ipu)
        for name, gradient in zip(clip.parameters, clip.gradients, strict=True):
            shape = self.has.variable(name).type.shape
            if self.has.at(gradient, clip.ipu, shard=True).shape != shape:
                raise ValueError(f"%{gradient} is no gradient of %{name}")

    def _number(self, instruction: GradientNorm | ClipFactor) -> None:
        if instruction.type.shape or not instruction.type.dtype.is_floating_point:
            raise ValueError(f"%{instruction.result} is {instruction.type}, no number")
        self.has.define(instruction.result, instruction.ipu, instruction.type, instruction)
