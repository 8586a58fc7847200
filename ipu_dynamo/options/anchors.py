"""Define anchors: values inside a program that each call also returns to the host."""

from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.errors import OptionError
from ipu_dynamo.options.checks import check_choices

AnchorKind = Literal["value", "gradient", "update"]
AnchorReturns = Literal["all", "every", "final", "sum"]


@dataclass(frozen=True, slots=True)
class Anchor:
    """A value inside a program that comes to the host.

    Args:
        name: one of `CompiledModel.value_names`: a parameter or buffer, an input, the result of an
            operator (`fc1/MatMul:0`), a state of the optimiser (`fc1.weight.exp_avg`), or
            `loss_scale`.
        of: the `value` itself; a micro-batch's `gradient` with respect to it, of the scaled loss;
            or the result of the step's `update` of a parameter.
        returns: of which micro-batches, as `Options.output_mode` has it. Variables are read in the
            micro-batch, before the step's update. With `final` they are read after the last update.
        period: with `every`, that of each n-th device iteration; there may be none.

    Raises:
        OptionError: for a value that a field cannot have.
    """

    name: str
    of: AnchorKind = "value"
    returns: AnchorReturns = "final"
    period: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise OptionError(f"the name of an anchor is {self.name!r}; it is a text")
        check_choices(self)
        if type(self.period) is not int or self.period < 1:
            raise OptionError(f"the period of anchor {self.name} is {self.period!r}; from 1 on")
