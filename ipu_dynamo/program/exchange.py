"""Count the bytes that IPUs send each other."""

from collections import Counter
from collections.abc import Sequence
from typing import assert_never

from ipu_dynamo.program.ir.clipping import ClipFactor, ClipValues, GradientNorm
from ipu_dynamo.program.ir.coupled_update import JointUpdate, UpdatePart
from ipu_dynamo.program.ir.instructions import (
    AdjustLossScale,
    AllGather,
    AllReduce,
    Call,
    Copy,
    Instruction,
    Load,
    Receive,
    ReduceScatter,
    Repeat,
    Send,
    Store,
    Update,
)
from ipu_dynamo.program.ir.update_factors import UpdateFactors
from ipu_dynamo.program.ir.writes import Accumulate, WriteBuffer

Links = Counter[tuple[int, int]]  # (from, to): bytes


def exchanged(body: Sequence[Instruction]) -> Links:
    """The bytes that one run of `body` copies from each IPU to each other one."""
    total: Links = Counter()
    for instruction in body:
        match instruction:
            case Copy(type=moved, src=src, dst=dst):
                total[src, dst] += moved.nbytes
            case Repeat(count=count, body=inner):
                for link, nbytes in exchanged(inner).items():
                    total[link] += count * nbytes
            case Receive() | Send() | Call() | Store() | Load() | AllGather() | ReduceScatter():
                continue
            case AllReduce() | Update() | AdjustLossScale() | Accumulate() | WriteBuffer():
                continue
            case GradientNorm() | ClipFactor() | ClipValues() | UpdateFactors():
                continue
            case UpdatePart() | JointUpdate():
                continue
            case _:
                assert_never(instruction)
    return total
