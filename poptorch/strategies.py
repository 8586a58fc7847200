"""Say which blocks of a model form which stage, on which IPU, and how stages take turns.

The objects hold the user's choices. `core_strategy()` returns them as plain data. From these, and
from the blocks that it meets while tracing, the compiler works out stages and IPUs.
"""

from collections.abc import Iterable
from typing import Any, Self

from poptorch.enums import AutoStage, Liveness
from poptorch.errors import require
from poptorch.stages import BlockId, Phase, Stage, as_phase, as_stage

_PIPELINED, _SHARDED, _PHASED = 0, 1, 2  # values of the option `execution_mode`


class ExecutionStrategy:
    """The members of every strategy. Invariant: a block belongs to at most one stage."""

    kind: str
    execution_mode: int
    _sharded_if_short = False  # set by configurations of other programs, never by PopTorch's names

    def __init__(self, stages: Iterable[Stage], auto_stage: AutoStage = AutoStage.SameAsIpu):
        self.auto_stage = auto_stage
        self.stages = tuple(stages)
        self._stage_of: dict[BlockId, Stage] = {}
        for stage in self.stages:
            for block in stage.blocks:
                require(block not in self._stage_of, f"{block} associated with more than one stage")
                self._stage_of[block] = stage

    def stage(self, block_id: BlockId) -> Stage:
        """Return the stage that a block was given.

        Args:
            block_id: identifier of a block.
        """
        known = ", ".join(map(repr, self._stage_of)) or "none: stages are chosen while tracing"
        require(block_id in self._stage_of, f"Unknown block {block_id} (known blocks: {known})")
        return self._stage_of[block_id]

    def backendOptions(self) -> dict[str, int | bool]:
        """The strategy's entries in `Options.toDict()`."""
        return {"execution_mode": self.execution_mode}

    def core_strategy(self) -> dict[str, Any]:
        """The strategy as plain data.

        Returns:
            "kind": pipelined, sharded, serial_phased or parallel_phased;
            "auto_stage": same_as_ipu or auto_increment, of use when "stages" is empty;
            "stages": per explicit stage its block ids and its IPU or None.
        """
        automatic = {
            AutoStage.SameAsIpu: "same_as_ipu",
            AutoStage.AutoIncrement: "auto_increment",
        }
        return {
            "kind": self.kind,
            "auto_stage": automatic[self.auto_stage],
            "stages": tuple((tuple(stage.blocks), stage.ipu_id) for stage in self.stages),
        }

    def __repr__(self) -> str:
        arguments = map(repr, self.stages) if self.stages else [f"AutoStage.{self.auto_stage.name}"]
        return f"{type(self).__name__}({', '.join(arguments)})"


class PipelinedExecution(ExecutionStrategy):
    """Keep every stage busy with another micro-batch.

    Args:
        args: nothing or one `AutoStage`: stages are chosen while tracing; otherwise one argument
            per stage: a `Stage`, a block id, or several block ids.
    """

    kind = "pipelined"
    execution_mode = _PIPELINED

    def __init__(self, *args: AutoStage | Stage | BlockId | Iterable[BlockId]) -> None:
        if not args:
            super().__init__(())
        elif len(args) == 1 and isinstance(args[0], AutoStage):
            super().__init__((), args[0])
        else:
            super().__init__(as_stage(arg) for arg in args)


class ShardedExecution(PipelinedExecution):
    """Let the stages of one micro-batch run one after the other, then those of the next.

    Args:
        args: as for `PipelinedExecution`.
    """

    kind = "sharded"
    execution_mode = _SHARDED


class _PhasedExecution(ExecutionStrategy):
    """The common part of both phased strategies. Invariant: there is at least one phase."""

    execution_mode = _PHASED
    serial: bool

    def __init__(self, *phases: Any) -> None:
        if len(phases) == 1 and (
            _is_list_of(phases[0], Phase) or _is_list_of(phases[0], list | tuple)
        ):
            phases = tuple(phases[0])  # as the published examples write it
        require(phases, f"{type(self).__name__} needs at least one phase")
        self.phases = tuple(as_phase(phase) for phase in phases)
        self._separate_backward_phase = False
        self._liveness = Liveness.AlwaysLive
        super().__init__(stage for phase in self.phases for stage in phase.stages)

    def phase(self, phase: int) -> Phase:
        """Return a phase.

        Args:
            phase: its number, from 0.
        """
        require(
            isinstance(phase, int) and phase >= 0,
            f"A phase is named by a positive integer or 0, got {phase!r}",
        )
        return self.phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        """Let the backward pass begin in a phase of its own, not in the last forward one.

        Args:
            use: False restores the default.
        """
        require(isinstance(use, bool), f"use must be True or False, got {use!r}")
        self._separate_backward_phase = use
        return self

    def backendOptions(self) -> dict[str, int | bool]:
        return {
            **super().backendOptions(),
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": int(self._liveness),
            "serial_phases_execution": self.serial,
        }

    def core_strategy(self) -> dict[str, Any]:
        """The strategy as plain data.

        Returns:
            as for every strategy, and "phases": the number of stages of each phase;
            "separate_backward_phase": bool; "liveness": name of a `Liveness`.
        """
        return {
            **super().core_strategy(),
            "phases": tuple(len(phase.stages) for phase in self.phases),
            "separate_backward_phase": self._separate_backward_phase,
            "liveness": self._liveness.name,
        }

    def __repr__(self) -> str:
        settings = f"separate_backward_phase={self._separate_backward_phase}"
        phases = ", ".join(map(repr, self.phases))
        return f"{type(self).__name__}({phases}, {settings}, liveness={self._liveness.name})"


class SerialPhasedExecution(_PhasedExecution):
    """Let phases run one after the other on the same IPUs.

    Args:
        phases: per phase a `Phase`, a `Stage`, a block id, a list of stages, or a list of block
            ids, which then form one stage.
    """

    kind = "serial_phased"
    serial = True

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        """Choose how long tensors stay on the chip.

        Args:
            liveness: when they move to streaming memory.
        """
        require(
            isinstance(liveness, Liveness), f"liveness must be a poptorch.Liveness: {liveness!r}"
        )
        self._liveness = liveness
        return self


class ParallelPhasedExecution(_PhasedExecution):
    """Let even phases run on even IPUs while odd phases run on odd ones.

    Args:
        phases: as for `SerialPhasedExecution`.
    """

    kind = "parallel_phased"
    serial = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> Self:
        """Choose whether activations leave the chip when the forward pass ends.

        Args:
            off_chip: True moves them to streaming memory until the backward pass reads them.
        """
        require(isinstance(off_chip, bool), f"off_chip must be True or False, got {off_chip!r}")
        self._liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self


def _is_list_of(value: Any, kind: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(part, kind) for part in value)
    )


__all__ = [
    "AutoStage",
    "BlockId",
    "ExecutionStrategy",
    "Liveness",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
]
