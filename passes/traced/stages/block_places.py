"""Find the stage or phase, and the IPU, of every block that a model begins.

Source: PopTorch user guide, "Annotation tools" and "Parallel execution strategies".
"""

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import NamedTuple

from torch import fx

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.marks.markers import NO_IPU
from ipu_dynamo.options import StageSpec, Strategy


class BlockError(CompileError, AssertionError):
    """A block's id or IPU does not fit the strategy."""

    id = "block"


class Place(NamedTuple):
    """Where a block runs; `number` is its phase in a phased strategy, else its stage."""

    number: int
    ipu: int


@dataclass
class BlockStages:
    """The blocks that have begun so far: their ids and stage numbers."""

    strategy: Strategy
    numbers: dict[str, int] = field(default_factory=dict)
    automatic: dict[str, str] = field(default_factory=dict)
    first_number: int = 0

    def begin(self, marker: fx.Node) -> Place:
        """The place of the block that `marker` begins."""
        name, ipu = str(marker.args[0]), int(marker.args[1])  # type: ignore[arg-type]
        name = self._identify(name)
        if self.strategy.phased:
            return self._in_phase(name, ipu, marker)
        stage = self._stage(name, ipu, marker)
        explicit = self.strategy.stages[stage].ipu if self.strategy.stages else None
        if explicit is not None:
            return Place(stage, explicit)
        return Place(stage, stage if ipu == NO_IPU else ipu)

    def _identify(self, name: str) -> str:
        """The block's id: its own, or the next number for one without ("" or "#...")."""
        if name and not name.startswith("#"):
            return name
        key = name or f"anonymous {len(self.automatic)}"
        return self.automatic.setdefault(key, str(len(self.automatic)))

    def _stage(self, name: str, ipu: int, marker: fx.Node) -> int:
        if self.strategy.stages:
            for number, stage in enumerate(self.strategy.stages):
                if name in stage.blocks:
                    return number
            known = [block for stage in self.strategy.stages for block in stage.blocks]
            near = get_close_matches(name, known, 1)
            raise BlockError(
                f"Unknown Block '{name}' list of expected Blocks: {known}",
                node=marker,
                hint=f"name the block {name!r} in one of the strategy's stages"
                + (f", where {near[0]!r} may be meant for it" if near else ""),
            )
        if name not in self.numbers:
            if self.strategy.auto_stage == "auto_increment":
                self.numbers[name] = self.first_number + len(self.numbers)
            elif ipu == NO_IPU:
                raise BlockError(
                    f"poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for "
                    f"block {name}",
                    node=marker,
                    hint="give the block an ipu_id, or select AutoStage.AutoIncrement",
                )
            else:
                self.numbers[name] = ipu
        return self.numbers[name]

    def _in_phase(self, name: str, ipu: int, marker: fx.Node) -> Place:
        """The phase that names the block; the IPU of its stage there, or else its own."""
        phase, stage = self._phase_of(name, marker)
        if stage.ipu is not None:
            ipu = stage.ipu
        if ipu == NO_IPU:
            raise CompileError(
                f"block '{name}' of phase {phase} has no IPU",
                node=marker,
                hint="give its stage an IPU (Stage.ipu, Phase.ipus), or the block an ipu_id",
                id="block",
            )
        if self.strategy.kind == "parallel_phased" and ipu % 2 != phase % 2:
            raise CompileError(
                "When phases are executed in parallel: even phases must run on even IPUs and odd "
                f"phases on odd IPUs. Block '{name}' of phase {phase} is on IPU {ipu}",
                node=marker,
                hint="choose another IPU, or the serial phased strategy",
                id="block",
            )
        return Place(phase, ipu)

    def _phase_of(self, name: str, marker: fx.Node) -> tuple[int, StageSpec]:
        for number, stages in enumerate(self.strategy.phases):
            for stage in stages:
                if name in stage.blocks:
                    return number, stage
        known = [
            block for stages in self.strategy.phases for stage in stages for block in stage.blocks
        ]
        raise CompileError(
            f"Invalid phase for ExecutionMode::Phased: block '{name}' is in no phase; the phases "
            f"have the blocks {known}",
            node=marker,
            hint="name the block in one of the strategy's phases",
            id="block",
        )
