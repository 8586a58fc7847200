"""Plan which activations of a phased program leave the chip between phases, and when they return.

Before   parts in phases; every value stays on its IPU until its last reader has run
After    the same with `moves`: the values to load before each part and to store after it
Keeps    the parts, and which values they read.
Source   PopTorch user guide, "poptorch.Liveness".
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ipu_dynamo.capture.capture import ACCUMULATION_WEIGHT, STREAMED
from ipu_dynamo.options import Liveness, Location
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Move, Moves, Part, Partitioned
from ipu_dynamo.program import TensorType


@dataclass(frozen=True, slots=True)
class ActivationRule:
    """The rule for values that leave the chip: a liveness, and a location for activations."""

    liveness: Liveness
    location: Location

    @property
    def moves_any(self) -> bool:
        """Whether any value leaves the chip."""
        return self.location.off_chip and self.liveness != "always_live"

    def moves(self, type: TensorType, maker: Part, reader: Part) -> bool:
        """Whether a value that `maker` made is off the chip before `reader` runs."""
        large = prod(type.shape) >= self.location.min_elements
        return self.location.off_chip and large and _later(self.liveness, maker, reader)


def _later(liveness: Liveness, maker: Part, reader: Part) -> bool:
    """Whether there is a transfer between two parts."""
    if liveness == "always_live":
        return False
    if liveness == "off_chip_after_each_phase":
        return maker.phase != reader.phase
    return maker.direction == "forward" and reader.direction == "backward"


def _plan(
    parts: Sequence[Part],
    types: Mapping[str, TensorType],
    streams: Collection[str],
    rule: ActivationRule,
) -> Moves:
    """Plan the moves.

    A value is stored once, when its phase or the forward pass ends. It is loaded in the phase
    before its reader: for each such phase if each phase ends with stores, else once by each IPU.

    Args:
        parts: of a micro-batch, in order.
        types: of the results of parts, and of streams.
        streams: inputs that IPUs receive. An IPU may read such a value again later.
    """
    moves, liveness = Moves(), rule.liveness
    made: dict[tuple[str, int], int] = {}  # value and its owner -> index of the part
    owners: dict[str, int] = {}
    stored: set[tuple[str, int]] = set()
    loaded: set[tuple[str, int, int, int]] = set()
    for index, part in enumerate(parts):
        for name in part.reads:
            owner = part.ipu if name in streams else owners.get(name)
            if owner is None:
                continue  # a variable
            maker = made.setdefault((name, owner), index)
            if not rule.moves(types[name], parts[maker], part):
                continue
            if (name, owner) not in stored:
                stored.add((name, owner))
                after = _end(parts, maker, liveness)
                move = Move(name, owner, owner, _number(parts[after]) + 1)
                moves.stores.setdefault(after, []).append(move)
            phase = _number(part)
            once = phase if liveness == "off_chip_after_each_phase" else -1
            if (name, owner, part.ipu, once) not in loaded:
                loaded.add((name, owner, part.ipu, once))
                before = next(i for i, p in enumerate(parts) if p.phase == phase)
                move = Move(name, owner, part.ipu, phase - 1, until=phase)
                moves.loads.setdefault(before, []).append(move)
        for name in part.outputs:
            made[name, part.ipu], owners[name] = index, part.ipu
    for stores in moves.stores.values():
        stores.sort(key=lambda move: made[move.value, move.owner])
    return moves


def _end(parts: Sequence[Part], maker: int, liveness: Liveness) -> int:
    """Return the index of the part after which the results of `maker` are stored."""
    if liveness == "off_chip_after_each_phase":
        return max(i for i, part in enumerate(parts) if part.phase == parts[maker].phase)
    return max(i for i, part in enumerate(parts) if part.direction == "forward")


def _number(part: Part) -> int:
    assert part.phase is not None, "liveness without phases"
    return part.phase


class OffloadActivations(Pass):
    """The pass."""

    level = "parts"
    needed = "the values that it moves are not copied otherwise"

    rule: ActivationRule

    def applies(self, partitioned: Partitioned, contents: Contents) -> bool:
        return self.rule.moves_any or partitioned.moves != Moves()

    def __call__(self, partitioned: Partitioned) -> Partitioned:
        streams = {ACCUMULATION_WEIGHT: TensorType(torch.float32, ())}
        for node, role in partitioned.capture.roles().items():
            if role.kind in STREAMED:
                streams[role.name] = TensorType.of(node.meta["val"])
        types = partitioned.types | streams
        moves = _plan(partitioned.parts, types, streams, self.rule)
        return partitioned if moves == partitioned.moves else replace(partitioned, moves=moves)
