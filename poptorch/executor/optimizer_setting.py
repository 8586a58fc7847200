"""Give an executor that trains the numbers of an optimizer, the same one or another."""

import torch

from poptorch.core_errors import core_errors
from poptorch.enums import MeanReductionStrategy
from poptorch.errors import createPoptorchError
from poptorch.executor.optimizer_in_use import OptimizerInUse
from poptorch.optim import Optimizer
from poptorch.options import mean_reduction_strategy
from poptorch.weights import DeviceWeights


class OptimizerSetting(DeviceWeights):
    """The part of an executor that `setOptimizer` belongs to."""

    _update: OptimizerInUse | None

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the numbers of an optimizer, the same or another, from the next call on.

        Args:
            optimizer: has the parameters of the model, in groups as at the beginning.
        """
        if self._update is None:
            raise createPoptorchError(
                "setOptimizer is for training: this model infers only", id="optimizer"
            )
        update = self._update

        def use() -> None:
            self._check_strategy(optimizer)
            update.replace(optimizer, compiled=self.isCompiled())
            if self._core is not None:
                with core_errors("setting the optimizer", self._options):
                    self._core.set_optimizer(optimizer)

        self._weights.lock.run(use)

    def _read_optimizer_state(self) -> None:
        if self._update is not None and isinstance(own := self._update.optimizer, Optimizer):
            own.state_dict()  # which says so where it has not changed

    def _check_strategy(self, optimizer: torch.optim.Optimizer) -> None:
        """Adopt the mean reduction strategy that an optimizer's accumulators ask for."""
        training = self._options.Training
        wanted = mean_reduction_strategy(self._options, optimizer)
        if wanted == training.meanAccumulationAndReplicationReductionStrategy:
            return
        if self.isCompiled():
            raise ValueError(
                "Invalid optimizer: the new optimizer would require changing "
                "options.Training.meanAccumulationAndReplicationReductionStrategy to "
                f"poptorch.MeanReductionStrategy.{MeanReductionStrategy(wanted).name} but the "
                "executable is already compiled."
            )
        self._options._unfreeze()
        training.set(meanAccumulationAndReplicationReductionStrategy=wanted)
        self._options._freeze()
