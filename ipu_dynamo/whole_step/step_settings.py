"""Read and set the inputs of a step other than data and weights: loss scale, random state."""

from dataclasses import replace

import torch

from ipu_dynamo.errors import OptionError
from ipu_dynamo.whole_step.compiled_state import CompiledState
from ipu_dynamo.whole_step.weights.initial_state import loss_scale_variable


class StepSettings(CompiledState):
    """Settings of a compiled model that act from the next call on, without compiling again."""

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the backward pass of the next step."""
        name = loss_scale_variable(self.program)
        return self.options.loss_scale if name is None else self.executable.whole(name).item()

    @property
    def last_loss_scale(self) -> float | None:
        """The factor on the loss in the last step, if it is automatic; the first one before."""
        return self.executable.last_loss_scale

    @property
    def random_state(self) -> tuple[int, int]:
        """The state of random numbers for the next call, once compiled: the seed, and the device
        iterations that were completed since it was set."""
        executable = self.executable
        return executable.seed, executable.step

    def set_random_state(self, seed: int, step: int = 0) -> None:
        """Set the state of random numbers for the next call, as `random_state` returned it.

        The call draws as one that begins at device iteration `step` of `seed`.
        """
        self.executable.set_random_state(seed, step)

    def set_loss_scale(self, value: float) -> None:
        """Use another factor on the loss from the next call on; automatic scaling goes on from it.

        Raises:
            OptionError: the loss scale is part of the program, or `value` is not a positive number.
        """
        replace(self.options, loss_scale=value)  # checks it
        name = loss_scale_variable(self.program)
        if name is None:
            raise OptionError(
                f"the loss scale {self.options.loss_scale} is part of the program; compile it with "
                "Options(loss_scale_is_variable=True)"
            )
        self.executable.write({name: torch.tensor(value, dtype=torch.float64, device="cpu")})
