"""Choose how the machine rounds."""

from typing import ClassVar

import torch

from poptorch._logging import logger
from poptorch.enums import HalfFloatCastingBehavior
from poptorch.errors import require
from poptorch.options.container import OptionsDict
from poptorch.options.effects import Effect, setter
from poptorch.options.popart import _PopartOptions


class _PrecisionOptions(OptionsDict):
    """`Options.Precision`. Its values live among the settings of the lower layers."""

    _PREFIX: ClassVar[str] = "Precision."
    _popart: _PopartOptions

    def __init__(self, popart_options: _PopartOptions) -> None:
        super().__init__()
        self._declare_private(_popart=popart_options)

    @setter(Effect.COMPUTES)
    def enableFloatingPointExceptions(self, enabled: bool) -> None:
        """Raise as soon as an operator overflows, divides by zero or meets a NaN.

        Args:
            enabled: False is the default.
        """
        require(isinstance(enabled, bool), f"enabled must be True or False, got {enabled!r}")
        self._popart.store("enableFloatingPointChecks", enabled)

    @setter(Effect.COMPUTES)
    def enableStochasticRounding(self, enabled: bool) -> None:
        """Round to half precision up or down at random, unbiased.

        Args:
            enabled: False, the default, rounds to the nearest number.
        """
        self._popart.store("enableStochasticRounding", enabled)

    @setter(Effect.COMPUTES)
    def setPartialsType(self, dtype: torch.dtype) -> None:
        """Keep partial sums of matrix products and convolutions in `dtype`.

        Args:
            dtype: torch.float or torch.half.
        """
        names = {torch.float: "float", torch.half: "half"}
        if dtype not in names:
            raise ValueError(f"partials are of type torch.float or torch.half, got {dtype}")
        self._popart.store("partialsTypeMatMuls", names[dtype])
        self._popart.merge("convolutionOptions", partialsType=names[dtype])

    @setter(Effect.RECORDED)
    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> None:
        """Do nothing: promotion follows PyTorch's rules.

        Args:
            half_float_casting: has no effect.
        """
        logger.warning(
            "Precision.halfFloatCasting is deprecated and has no effect: half and float operands "
            "promote as in PyTorch"
        )

    @setter(Effect.RECORDED)
    def runningStatisticsAlwaysFloat(self, value: bool) -> None:
        """Do nothing: running statistics keep the type of their buffers.

        Args:
            value: has no effect.
        """
        if not isinstance(value, bool):
            raise ValueError(f"value must be True or False, got {value!r}")
        logger.warning(
            "Precision.runningStatisticsAlwaysFloat is deprecated and has no effect: convert the "
            "buffers of the normalisation module to the type that you want"
        )
