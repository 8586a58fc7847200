"""Define the part of a prediction about an IPU's memory, and its verdict.

All bytes are of one replica. Fields named after a list hold positions in it.
"""

from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.program.liveness.live_tensors import CategoryName

Word = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class ByteEstimate:
    """An estimate of bytes: code is uncertain, all else is the same in the three."""

    low: int
    central: int
    high: int


@dataclass(frozen=True, slots=True)
class MemoryCategory:
    """Bytes of an IPU in one category, at the peak."""

    name: CategoryName
    nbytes: ByteEstimate


@dataclass(frozen=True, slots=True)
class TileProfile:
    """Bytes at the peak of the emptiest, the median and the fullest tile of an IPU."""

    least: int
    median: int
    fullest: ByteEstimate


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A value that is live during steps of a block.

    Args:
        name: in the function.
        made: step that makes it; -1: another call, or it is received.
        last: step that reads it last; -1: another call reads it later.
    """

    name: str
    type: str
    nbytes: int
    made: int
    last: int


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """Memory during the steps of a block, once for all calls of an IPU with the same lifetimes.

    Args:
        block: position in `blocks`.
        activations, temporaries: bytes on the IPU at each step, without the calls' held values.
        lifetimes: of the values that the block makes or reads.
    """

    block: int
    activations: tuple[int, ...]
    temporaries: tuple[int, ...]
    lifetimes: tuple[Lifetime, ...]


@dataclass(frozen=True, slots=True)
class HeldValue:
    """A value that is live all through a call that does not touch it: one that another call made.

    Args:
        call: that made it, a position in `calls`.
        lifetime: position in the lifetimes of its memory block.
    """

    call: int
    lifetime: int


@dataclass(frozen=True, slots=True)
class MemoryCall:
    """Memory during a call.

    Args:
        call: position in `calls`.
        memory_block: position in the IPU's `blocks`.
        held: bytes of activations that are live all through it.
        held_values: these values.
    """

    call: int
    memory_block: int
    held: int
    held_values: tuple[HeldValue, ...]


@dataclass(frozen=True, slots=True)
class PeakTensor:
    """A tensor that is live at the peak.

    Args:
        nbytes: of all its copies.
        maker, reader: the operator that makes it, and the last one that reads it; or its kind.
        line: of its maker, or empty.
    """

    name: str
    type: str
    nbytes: int
    category: CategoryName
    maker: str
    line: str
    reader: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The program step at which an IPU needs most memory.

    Args:
        call: position in `calls`; -1: outside of calls.
        step: of its block.
        tensors: largest first.
    """

    call: int
    step: int
    tensors: tuple[PeakTensor, ...]


@dataclass(frozen=True, slots=True)
class IpuMemory:
    """Memory of an IPU.

    Args:
        limit: bytes of all its tiles, less those that are reserved.
        tile_limit: the same of one tile.
        always_live: bytes that are there at every program step.
        total: bytes at the peak.
        blocks, calls: memory over program steps.
    """

    limit: int
    tile_limit: int
    always_live: ByteEstimate
    total: ByteEstimate
    categories: tuple[MemoryCategory, ...]
    profile: TileProfile
    blocks: tuple[MemoryBlock, ...]
    calls: tuple[MemoryCall, ...]
    peak: Peak


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """Whether the program fits, by the fullest tile of all IPUs.

    Args:
        ipu: that has this tile.
        tile: its bytes.
        limit: bytes that a tile has for a program.
    """

    word: Word
    ipu: int
    tile: ByteEstimate
    limit: int
