"""Price transfers: with the host, streaming memory, other IPUs and replicas.

An IPU's copies of one pipeline cycle take place at once, so copies are timed together.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from ipu_dynamo.machine.costs.basics import machine_bytes
from ipu_dynamo.machine.system import System
from ipu_dynamo.program.ir.base_instruction import BaseInstruction, Moved
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.types import TensorType

Route = Literal["copy", "host", "off chip", "replicas"]
TypeOf = Callable[[str], TensorType]


class TimedMove(NamedTuple):
    """A transfer of one IPU with its cycles.

    Args:
        hidden: it overlaps with the IPU's computation.
        once: its host stream is read once in a step, and not for each micro-batch.
        loop: of a hidden transfer: the loop at whose ends one does not overlap; empty: no loop.
    """

    route: Route
    ipu: int
    cycles: int
    hidden: bool
    once: bool
    loop: str
    move: Moved


@dataclass(frozen=True)
class MoveTimes:
    """The times of transfers of a program on a system.

    Args:
        type_of: the type of a value or variable on one replica, as it is held there.
        shards: the number of parts of values that are scattered over replicas, by name.
    """

    program: Program
    system: System
    type_of: TypeOf
    shards: Mapping[str, int]

    def cycles(self, seconds: float) -> int:
        """Whole cycles of so much time."""
        return ceil(round(seconds * float(self.system.ipu.clock), 6))

    def moves(self, instruction: BaseInstruction) -> tuple[TimedMove, ...]:
        """The transfers of an instruction, except for copies between IPUs."""
        timed = [self._timed(move) for move in instruction.moves]
        return tuple(move for move in timed if move is not None)

    def copies(self, instructions: Iterable[BaseInstruction]) -> dict[tuple[int, int], int]:
        """The cycles of copies that take place at once, by the IPUs from and to."""
        nbytes: dict[tuple[int, int], int] = {}
        for instruction in instructions:
            for move in instruction.moves:
                if isinstance(move.src, int) and isinstance(move.dst, int):
                    pair = move.src, move.dst
                    nbytes[pair] = nbytes.get(pair, 0) + self._bytes(move)
        return {pair: self._copy(*pair, amount) for pair, amount in nbytes.items()}

    def host_bytes(self, nbytes: int) -> int:
        """The cycles of a stream of so many bytes."""
        return self.cycles(nbytes / float(self.system.host))

    @property
    def host_sync(self) -> int:
        """The cycles of a barrier with the host."""
        return self.cycles(float(self.system.host_sync))

    def _copy(self, src: int, dst: int, nbytes: int) -> int:
        system = self.system
        near = src // system.machine_ipus == dst // system.machine_ipus
        rate = float(system.link if near else system.machine_link)
        return self.cycles(nbytes / rate + float(system.link_seconds))

    def _timed(self, move: Moved) -> TimedMove | None:
        if move.src == "replicas":
            assert isinstance(move.dst, int)
            return self._made("replicas", move.dst, self._over_replicas(move), move)
        if "off chip" in (move.src, move.dst):
            ipu = move.dst if isinstance(move.dst, int) else move.src
            assert isinstance(ipu, int)
            cycles = self._off_chip(self._bytes(move))
            return self._made("off chip", ipu, cycles, move, hidden=move.io_tiles)
        if "host" in (move.src, move.dst):
            return self._host(move)
        return None

    def _host(self, move: Moved) -> TimedMove | None:
        """A host stream; None: the machine makes its values itself."""
        if move.src == "host":
            stream = next(i for i in self.program.inputs if i.name == move.value)
            assert isinstance(move.dst, int)
            ipu, once = move.dst, False
            if stream.source != "host":
                return None
            type_, overlap = stream.type, stream.overlap
        else:
            sent = next(o for o in self.program.outputs if o.name == move.result)
            assert isinstance(move.src, int)
            ipu, type_, overlap = move.src, sent.type, sent.overlap
            once = sent.printing is None and sent.returns in ("final", "sum", "once")
        hidden = overlap != "no_overlap"
        loop = overlap if hidden else ""
        cycles = self.host_bytes(machine_bytes(type_))
        return self._made(
            "host", ipu, cycles, move, hidden=hidden and not once, once=once, loop=loop
        )

    def _made(
        self,
        route: Route,
        ipu: int,
        cycles: int,
        move: Moved,
        *,
        hidden: bool = False,
        once: bool = False,
        loop: str = "",
    ) -> TimedMove:
        return TimedMove(route, ipu, cycles, hidden, once, loop, move)

    def _off_chip(self, nbytes: int) -> int:
        system = self.system
        chunks = ceil(nbytes / float(system.remote_chunk))
        return self.cycles(nbytes / float(system.remote) + chunks * float(system.remote_seconds))

    def _over_replicas(self, move: Moved) -> int:
        """A part of a ring: r - 1 of r parts of the bytes, twice for a sum."""
        if move.how == "all_reduced":
            members = move.shards or self.program.replicas
            held = self.type_of(move.value).shard(self.shards.get(move.value, 1))
            nbytes = 2 * (members - 1) / members * machine_bytes(held)
        elif move.sums:
            assert move.type is not None
            others = move.type.shape[0]
            nbytes = 2 / (others + 1) * machine_bytes(move.type) if others else 0.0
        elif move.shards is not None and move.type is not None:
            nbytes = (move.shards - 1) * machine_bytes(move.type.shard(move.shards))
        else:
            assert move.type is not None
            nbytes = machine_bytes(move.type)
        return self.cycles(nbytes / float(self.system.collective))

    def _bytes(self, move: Moved) -> int:
        """The bytes that an IPU moves, in dtypes of the machine."""
        own = self.type_of(move.value)
        if move.type is None:
            return machine_bytes(own)
        made = TensorType(own.dtype, move.type.shape)
        return machine_bytes(made if own.shape == move.type.shape else move.type)
