"""Define how an instruction describes itself: the values that it reads, makes, writes, moves.

The verifier, schedules, registers and counts of bytes read these descriptions. A new instruction
describes itself and needs nothing in them.
"""

from collections.abc import Iterable, Sized
from typing import ClassVar, Literal, NamedTuple

from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_rules import Rule
from ipu_dynamo.program.ir.values import Kind

Section = Literal["before", "loop", "after"]
BEFORE: frozenset[Section] = frozenset(("before",))
LOOP: frozenset[Section] = frozenset(("loop",))
AFTER: frozenset[Section] = frozenset(("after",))
Place = int | Literal["host", "off chip", "replicas"]  # an int is an IPU
How = Literal[
    "received",
    "sent",
    "copied",
    "stored",
    "loaded",
    "gathered",
    "scattered",
    "all_reduced",
    "exchanged",
]
DoneBy = Literal["first", "previous", "next there", "last there"]
Does = Literal["store", "+=", "mean", "norm", "factor", "clamp", "update", "function"]


class Use(NamedTuple):  # thousands are made and dropped again while a program is checked
    """A value or variable that an instruction reads, makes or writes on an IPU.

    Args:
        type: its type; None: the one that it has, or that a function returns.
        kinds: it is a variable of one of these kinds; empty: it may be a value.
        shard: a shard on each replica is enough.
        own_pass: it is a result of a call of the same stage pass.
        number: it divides gradients, so it has no dimension.
    """

    name: str
    ipu: int
    type: TensorType | None = None
    kinds: tuple[Kind, ...] = ()
    shard: bool = False
    own_pass: bool = False
    number: bool = False


class Moved(NamedTuple):
    """A value or variable that an instruction moves, on each replica.

    A variable keeps its name between an IPU and streaming memory. `replicas` are the other ones,
    which have it on the same IPU and under the same name.

    Args:
        value, result: its names before and after, on the host that of a stream.
        src, dst: where it is before and after.
        type: of the moved value; None: that of the stream, or of the variable `value`.
        shard: each replica moves its shard, which has the type.
        shards: how many replicas have a part each of a gathered or scattered value, or take part in
            a sum; None: all.
        sums: the replicas' values are summed.
        io_tiles: it goes through tiles that only transfer, while others compute.
        phase: of a phased program, in which it takes place.
    """

    how: How
    value: str
    result: str
    src: Place
    dst: Place
    type: TensorType | None = None
    shard: bool = False
    shards: int | None = None
    sums: bool = False
    io_tiles: bool = False
    phase: int | None = None

    @property
    def nbytes(self) -> int | None:
        """The bytes that a replica gets; None: those of the stream or of the variable."""
        if self.type is None or self.shards is None:
            return None if self.type is None else self.type.nbytes
        return (self.shards - 1) * self.type.shard(self.shards).nbytes

    @property
    def of_variable(self) -> bool:
        """Whether it brings a variable to an IPU or takes it away."""
        return self.value == self.result and "off chip" in (self.src, self.dst)

    @property
    def reads(self) -> bool:
        """Whether `value` names something in the program."""
        return self.src not in ("host", "replicas")

    @property
    def makes(self) -> bool:
        """Whether `result` names something new in the program."""
        return self.src == "host" or (self.dst != "host" and self.value != self.result)


class Computed(NamedTuple):
    """Arithmetic of an instruction on each replica, in addition to calls of a micro-batch.

    Args:
        does: `store` copies elements, `+=` adds, `mean` moves a mean; `factor` and `clamp` change
            elements, `norm` sums powers of them; `update` follows a rule; or a function.
        over: the variable or value whose elements are computed. A replica has its shard of it.
        rule: of an update; one that was traced has a function.
        function: of traced updates.
    """

    does: Does
    over: str
    rule: Rule | None = None
    function: str | None = None


class BaseInstruction:
    """The description that every instruction gives of itself.

    Attributes:
        sections: where it may stand: before the micro-batches of a step, in them, or after them.
        done_by: the stage pass of a micro-batch that does it: the first one, that of the previous
            call, or the next or the last one of its IPU. If it fetches, that of the next call.
    """

    __slots__ = ()
    sections: ClassVar[frozenset[Section]] = frozenset()
    done_by: ClassVar[DoneBy] = "previous"

    @property
    def reads(self) -> tuple[Use, ...]:
        """The values and variables that it reads, except those that it moves."""
        return ()

    @property
    def makes(self) -> tuple[Use, ...]:
        """The values that it makes, except for those that it moves."""
        return ()

    @property
    def writes(self) -> tuple[Use, ...]:
        """The variables and values that it writes over."""
        return ()

    @property
    def moves(self) -> tuple[Moved, ...]:
        """The values and variables that it moves between places."""
        return ()

    @property
    def computes(self) -> tuple[Computed, ...]:
        """The arithmetic that it does, except for that of calls."""
        return ()

    @property
    def fetches(self) -> str | None:
        """The variable that it brings to an IPU for the next call, on the way to be read."""
        return None

    @property
    def columns(self) -> tuple[tuple[str, Sized], ...]:
        """Fields with aligned entries, each with its name in errors."""
        return ()

    @property
    def ipus(self) -> tuple[int, ...]:
        """The IPUs that it names."""
        places = {use.ipu for use in (*self.reads, *self.makes, *self.writes)}
        for move in self.moves:
            places.update(place for place in (move.src, move.dst) if isinstance(place, int))
        return tuple(places)

    @property
    def nbytes(self) -> int:
        """The bytes that it moves on each replica, as far as it has types of the moved values."""
        return sum(move.nbytes or 0 for move in self.moves)

    @property
    def read_names(self) -> tuple[str, ...]:
        """The names of all that it reads."""
        moved = [move.value for move in self.moves if move.reads]
        return (*moved, *[use.name for use in self.reads])

    @property
    def made_names(self) -> tuple[str, ...]:
        """The names of all values that it makes."""
        moved = [move.result for move in self.moves if move.makes]
        return (*moved, *[use.name for use in self.makes])

    @property
    def written_names(self) -> tuple[str, ...]:
        """The names of all that it writes over."""
        return tuple([use.name for use in self.writes])


def used(
    names: tuple[str, ...],
    ipu: int,
    *,
    kinds: tuple[Kind, ...] = (),
    shard: bool = False,
    own_pass: bool = False,
) -> tuple[Use, ...]:
    """A use of each of some names, with equal conditions."""
    return tuple([Use(name, ipu, None, kinds, shard, own_pass) for name in names])


def made(names: tuple[str, ...], types: tuple[TensorType | None, ...], ipu: int) -> tuple[Use, ...]:
    """A use of each of some names, which have a type each."""
    return tuple(Use(name, ipu, type) for name, type in zip(names, types, strict=True))


def listed(names: Iterable[str]) -> str:
    """Names as the text of an instruction has them: `%a, %b`."""
    return ", ".join(f"%{name}" for name in names)


def divisors(ipu: int, *names: str | None) -> tuple[Use, ...]:
    """A use of each of some variables or values that divide gradients; None is skipped."""
    return tuple(Use(name, ipu, number=True) for name in names if name)
