"""Choose how gradients of several micro-batches and replicas make one update."""

from typing import Any, ClassVar

from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.options.container import OptionsDict
from poptorch.options.effects import Effect, setter
from poptorch.options.popart import _PopartOptions


class _TrainingOptions(OptionsDict):
    """`Options.Training`."""

    _PREFIX: ClassVar[str] = "Training."
    _popart: _PopartOptions
    _mean_strategy_given: bool

    def __init__(self, popart_options: _PopartOptions) -> None:
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=MeanReductionStrategy.Post,
        )
        self._declare_private(_popart=popart_options, _mean_strategy_given=False)

    @setter(Effect.COMPUTES)
    def gradientAccumulation(self, gradient_accumulation: int) -> None:
        """Accumulate the gradients of this many micro-batches for each update.

        Args:
            gradient_accumulation: at least 1.
        """
        self.set(gradient_accumulation=gradient_accumulation)

    @setter(Effect.COMPUTES)
    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> None:
        """Sum or average gradients over accumulation steps and replicas.

        Args:
            reduction_type: Sum or Mean.
        """
        if reduction_type not in (ReductionType.Sum, ReductionType.Mean):
            raise ValueError(
                "accumulationAndReplicationReductionType must be set to poptorch.ReductionType.Sum "
                f"or poptorch.ReductionType.Mean, got {reduction_type!r}"
            )
        self.set(accumulation_and_replication_reduction_type=ReductionType(reduction_type))

    @setter(Effect.COMPUTES)
    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> None:
        """Choose when an average divides. Unset, it depends on the optimizer's `accum_type`.

        Args:
            mean_reduction_strategy: Running divides at each addition, Post after the last one.
        """
        if not isinstance(mean_reduction_strategy, MeanReductionStrategy):
            raise ValueError(
                "mean_reduction_strategy must be a poptorch.MeanReductionStrategy, "
                f"got {mean_reduction_strategy!r}"
            )
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        self._mean_strategy_given = True

    @setter(Effect.COMPUTES)
    def setAutomaticLossScaling(self, enabled: bool) -> None:
        """Let the loss scale follow the size of the gradients in half precision.

        Args:
            enabled: False, the default, leaves the scale as it is.
        """
        self._popart.store("automaticLossScalingSettings.enabled", enabled)

    @setter(Effect.RECORDED)
    def setConvolutionDithering(self, enabled: bool) -> None:
        """Spread convolutions over different tiles.

        Args:
            enabled: False is the default.
        """
        self._popart.merge("convolutionOptions", enableConvDithering=_text(enabled))


def _text(enabled: Any) -> str:
    return "true" if enabled else "false"
