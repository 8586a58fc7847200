"""Group blocks into stages, and stages into phases."""

from collections.abc import Iterable
from typing import Any, Self

from ipu_dynamo.options.checks import MOST_IPUS
from poptorch.errors import require

BlockId = str


class Stage:
    """Blocks that run one after the other on one IPU.

    Args:
        block_ids: identifiers of blocks, in any order.
    """

    def __init__(self, *block_ids: BlockId) -> None:
        require(
            all(isinstance(block, str) for block in block_ids),
            f"Block ids must be strings, got {block_ids!r}",
        )
        self._blocks = block_ids
        self._ipu: int | None = None

    @property
    def blocks(self) -> list[BlockId]:
        """The identifiers of the stage's blocks."""
        return list(self._blocks)

    @property
    def ipu_id(self) -> int | None:
        """The IPU that `ipu` chose, None before."""
        return self._ipu

    def ipu(self, ipu: int) -> Self:
        """Run the stage on an IPU, and return the stage.

        Args:
            ipu: its number, from 0.
        """
        known = isinstance(ipu, int) and 0 <= ipu < MOST_IPUS
        require(known, f"An IPU is named by an integer from 0 to {MOST_IPUS - 1}, got {ipu!r}")
        self._ipu = ipu
        return self

    def __repr__(self) -> str:
        on = "" if self._ipu is None else f".ipu({self._ipu})"
        return f"Stage({', '.join(map(repr, self._blocks))}){on}"


class Phase:
    """Stages that run at the same time, each on an IPU of its own.

    Args:
        arg: either all `Stage`s, or all identifiers of blocks, which then form one stage.
    """

    def __init__(self, *arg: BlockId | Stage) -> None:
        if all(isinstance(part, Stage) for part in arg):
            self.stages = [part for part in arg if isinstance(part, Stage)]
        else:
            require(
                all(isinstance(part, str) for part in arg),
                f"A phase is made of stages only or of block ids only, got {arg!r}",
            )
            self.stages = [as_stage(arg)]

    def stage(self, idx: int) -> Stage:
        """Return a stage of the phase.

        Args:
            idx: its position, from 0.
        """
        return self.stages[idx]

    def ipus(self, *ipus: int) -> Self:
        """Give each stage its IPU, in order, and return the phase.

        Args:
            ipus: numbers of IPUs, from 0, one for each stage.
        """
        require(
            len(ipus) == len(self.stages),
            f"A phase of {len(self.stages)} stages needs as many IPUs, got {len(ipus)}",
        )
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)
        return self

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self.stages))})"


def as_stage(arg: Any) -> Stage:
    """A stage from a `Stage`, one block id, or several."""
    if isinstance(arg, Stage):
        return arg
    if isinstance(arg, str):
        return Stage(arg)
    require(
        isinstance(arg, Iterable),
        f"A stage is a poptorch.Stage, a block id or a list of block ids, got {arg!r}",
    )
    return Stage(*arg)


def as_phase(arg: Any) -> Phase:
    """A phase from a `Phase`, a `Stage`, a block id, or a list of stages or of block ids."""
    if isinstance(arg, Phase):
        return arg
    if isinstance(arg, Stage | str):
        return Phase(arg)
    require(
        isinstance(arg, Iterable),
        f"A phase is a poptorch.Phase, a stage, a block id, or a list of these, got {arg!r}",
    )
    return Phase(*arg)
