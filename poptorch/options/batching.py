"""Choose the steps, replicas and random seed of a call, and the outputs that it returns."""

import torch

from poptorch._logging import logger
from poptorch.enums import CommGroupType, OutputMode
from poptorch.errors import require
from poptorch.options.container import OptionsDict
from poptorch.options.effects import Effect, has_effect, setter


class BatchingOptions(OptionsDict):
    """The setters of `Options` that decide what a call computes."""

    @setter(Effect.COMPUTES)
    def deviceIterations(self, device_iterations: int) -> None:
        """Do this many steps (training) or forward passes (inference) in one call.

        Args:
            device_iterations: at least 1.
        """
        self.set(device_iterations=device_iterations)

    @setter(Effect.COMPUTES)
    def replicationFactor(self, replication_factor: int) -> None:
        """Run this many copies of the model on different data.

        Args:
            replication_factor: at least 1.
        """
        self.set(replication_factor=replication_factor)

    @setter(Effect.COMPUTES)
    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> None:
        """Give replicas of one group the same data. Set the replication factor first.

        Args:
            input_group_size: replicas in a group; a factor of the replication factor.
            input_group_type: Consecutive or Orthogonal, or NoGrouping for groups of one.
        """
        if input_group_type == CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, CommGroupType.Consecutive
        if input_group_type == CommGroupType.All:
            raise ValueError(
                "input_group_type cannot be All: for one group of all replicas use Consecutive "
                "with the replication factor as size"
            )
        replicas = self.replication_factor
        if replicas < input_group_size:
            raise ValueError(
                f"input_group_size {input_group_size} cannot be larger than the replication "
                f"factor {replicas}, which has to be set first"
            )
        if replicas % input_group_size:
            raise ValueError(
                f"input_group_size {input_group_size} must be a factor of the replication "
                f"factor {replicas}"
            )
        self.set(input_group_size=input_group_size, input_cgt=input_group_type)

    @setter(Effect.COMPUTES)
    def broadcastBuffers(self, broadcast_buffers: bool = True) -> None:
        """Promise that buffers are the same on all replicas.

        Args:
            broadcast_buffers: False makes no promise.
        """
        self.set(broadcast_buffers=broadcast_buffers)

    @setter(Effect.COMPUTES)
    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> None:
        """Choose which micro-batches' outputs a call returns.

        Args:
            output_mode: the choice.
            output_return_period: with EveryN, return each n-th device iteration.
        """
        require(
            isinstance(output_mode, OutputMode),
            f"output_mode must be a poptorch.OutputMode, got {output_mode!r}",
        )
        every = output_mode is OutputMode.EveryN
        if every:
            require(
                isinstance(output_return_period, int) and output_return_period > 0,
                f"EveryN needs a positive output_return_period, got {output_return_period!r}",
            )
        elif output_return_period is not None:
            logger.info("output_return_period is ignored with OutputMode.%s", output_mode.name)
        self.set(
            output_mode=output_mode.value,
            output_return_period=output_return_period if every else 1,
        )

    def defaultOutputMode(self) -> bool:
        """Whether the output mode is still to be chosen by the kind of executor."""
        return bool(self.output_mode == OutputMode.Default)

    @has_effect(Effect.COMPUTES)
    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int = 1,
    ) -> None:
        """Bring an inner tensor of the program back to the host. Call before compiling.

        Args:
            short_name: the name for `getAnchoredTensor`.
            long_name: the tensor's name in the program.
            output_mode: as for outputs; None: as the model's outputs.
            output_return_period: as for outputs.
        """
        period = output_return_period if output_mode == OutputMode.EveryN else 1
        self.anchored_tensors[short_name] = [long_name, output_mode is None, output_mode, period]

    @setter(Effect.COMPUTES)
    def randomSeed(self, random_seed: int) -> None:
        """Seed the machine's random numbers, and the host's default generator right now.

        Args:
            random_seed: a 64-bit integer.
        """
        require(isinstance(random_seed, int), f"random_seed must be an int, got {random_seed!r}")
        torch.manual_seed(random_seed)
        self.createOrSet(random_seed=random_seed)
