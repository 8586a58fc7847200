"""Say how the factor on the loss follows the size of the gradients."""

from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.errors import OptionError
from ipu_dynamo.options.checks import check_choices

Watched = Literal["all", "products"]


@dataclass(frozen=True, slots=True)
class AutomaticLossScaling:
    """Halve the loss scale after steps whose half gradients were large, else double it.

    No step is left out: gradients that overflow are applied, as on the machine.

    Args:
        edge: an element is large if its magnitude is above this share of the largest half, 65504.
        share: the scale is halved if more than this share of all watched elements is large: of
            all gradients, micro-batches and replicas since it last changed.
        period: steps after which it changes.
        watch: `all` gradients in float16 that the backward pass computes, views and copies of
            others left out; or only those that `products` (matrix products and convolutions) make.

    Source: PopTorch user guide, "poptorch.options._TrainingOptions.setAutomaticLossScaling".
    """

    edge: float = 0.125
    share: float = 1e-7
    period: int = 1
    watch: Watched = "all"

    def __post_init__(self) -> None:
        for name in ("edge", "share"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise OptionError(f"automatic loss scaling: {name} is {value!r}; it is a number")
            if not 0.0 <= value < 1.0:
                raise OptionError(
                    f"automatic loss scaling: {name} is {value}; it is at least 0 and less than 1"
                )
        if type(self.period) is not int or self.period < 1:
            raise OptionError(
                f"automatic loss scaling: period is {self.period!r}; it counts steps from 1"
            )
        check_choices(self, "automatic loss scaling:")
