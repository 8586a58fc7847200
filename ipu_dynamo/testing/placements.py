"""Draw placements: blocks with an id and an IPU, each before a layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypeVar, get_args

from hypothesis import strategies as st
from torch import nn

from ipu_dynamo.blocks import BeginBlock
from ipu_dynamo.options import (
    PARALLEL_LIVENESS,
    Liveness,
    StageSpec,
    Strategy,
    StrategyKind,
)

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class BlockAt:
    """A block that begins whenever the submodule `layer` is called; see `BeginBlock`.

    Args:
        layer: path of the submodule.
        user_id: name of the block; None: a number.
        ipu: number of the IPU, from 0; None leaves it to the strategy.
    """

    layer: str
    user_id: str | None = None
    ipu: int | None = None


@dataclass(frozen=True, slots=True)
class BlockPlacement:
    """Blocks of a model, and how they run.

    Args:
        blocks: in any order.
        strategy: for `Options`.
    """

    blocks: tuple[BlockAt, ...] = ()
    strategy: Strategy = field(default_factory=Strategy)

    def place(self, model: _Module) -> _Module:
        """Begin the blocks in `model`, and return it.

        Args:
            model: has the layers of the blocks.
        """
        for block in self.blocks:
            BeginBlock(model.get_submodule(block.layer), block.user_id, block.ipu)
        return model

    def micro_batches(self, *, training: bool) -> int:
        """The least number that fills the pipeline: per update, or per call of an inference.

        Args:
            training: count those of an update, and not of a call.
        """
        if self.strategy.kind != "pipelined":
            return 1
        ipus = [0, *(0 if block.ipu is None else block.ipu for block in self.blocks)]
        stages = len(list(groupby(ipus)))
        return 2 * stages - 1 if training else stages


Placement = BlockPlacement  # its earlier name, which programs have


@st.composite
def placements_of(
    draw: st.DrawFn,
    layers: Sequence[str],
    *,
    max_blocks: int = 4,
    max_ipus: int = 4,
    kinds: Sequence[StrategyKind] = ("sharded", "pipelined", "serial_phased", "parallel_phased"),
) -> BlockPlacement:
    """Placements that the compiler accepts if `layers` run in that order, each once.

    They shrink towards no block at all.

    Args:
        layers: names of submodules.
        max_blocks: how many blocks begin at most.
        max_ipus: a block is on one of that many IPUs, also on one that an earlier block was on.
        kinds: strategies to choose from.

    Example:
        @given(placement=placements_of(["conv1", "conv2", "fc"]))
        def test_my_model_does_not_depend_on_placement(placement):
            options = Options(strategy=placement.strategy, gradient_accumulation=8)
            assert_same_training(placement.place(MyModel()), [(x, y)], options)
    """
    positions = st.integers(0, len(layers) - 1)
    where = sorted(draw(st.sets(positions, max_size=max_blocks)))
    ipus = [draw(st.integers(0, max_ipus - 1)) for _ in where]
    kind = draw(st.sampled_from(list(kinds)))
    if kind in ("serial_phased", "parallel_phased"):
        return draw(_in_phases(kind, [layers[at] for at in where], ipus, max_ipus))
    split = kind == "pipelined" and draw(st.booleans())
    schedule: Literal["grouped", "zero_bubble"] = "zero_bubble" if split else "grouped"
    naming = draw(st.sampled_from(["named", "anonymous", "explicit"]))
    if naming == "explicit" and where:
        # Operators before the first block belong to the first stage, on IPU 0.
        named = [StageSpec((f"block {i}",), ipu) for i, ipu in enumerate(ipus)]
        stages = (StageSpec(("start",), 0), *named)
        strategy = Strategy(kind, stages=stages, schedule=schedule)
    else:
        ascending = ipus == sorted(ipus)
        automatic = ["auto_increment", *(["same_as_ipu"] if ascending or kind == "sharded" else [])]
        strategy = Strategy(kind, auto_stage=draw(st.sampled_from(automatic)), schedule=schedule)
    blocks = tuple(
        BlockAt(layers[position], None if naming == "anonymous" else f"block {i}", ipu)
        for i, (position, ipu) in enumerate(zip(where, ipus, strict=True))
    )
    return BlockPlacement(blocks, strategy)


@st.composite
def _in_phases(
    draw: st.DrawFn, kind: StrategyKind, layers: Sequence[str], ipus: Sequence[int], max_ipus: int
) -> BlockPlacement:
    """Blocks before `layers` in phases, several in one or one in each; they want `ipus`."""
    # Operators before the first block belong to the first phase, on IPU 0.
    phases = [[StageSpec(("start",), 0)]]
    blocks = []
    alternate = kind == "parallel_phased"
    for i, (layer, ipu) in enumerate(zip(layers, ipus, strict=True)):
        if draw(st.booleans()) and (max_ipus > 1 or not alternate):
            phases.append([])
        if alternate and ipu % 2 != (len(phases) - 1) % 2:
            ipu += 1 if ipu + 1 < max_ipus else -1
        explicit = draw(st.booleans())
        phases[-1].append(StageSpec((f"block {i}",), ipu if explicit else None))
        blocks.append(BlockAt(layer, f"block {i}", ipu))
    strategy = Strategy(
        kind,
        phases=tuple(map(tuple, phases)),
        liveness=draw(st.sampled_from(PARALLEL_LIVENESS if alternate else get_args(Liveness))),
        separate_backward_phase=draw(st.booleans()),
    )
    return BlockPlacement(tuple(blocks), strategy)
