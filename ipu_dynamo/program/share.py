"""Say which replicas and IPUs of a program a process runs."""

from dataclasses import dataclass
from typing import Self

from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.program.ir.values import Variable


@dataclass(frozen=True, slots=True)
class Share:
    """A block of the replicas and a block of the IPUs: the place of a rank on a mesh.

    Ranks of one row run the same replicas, ranks of one column the same IPUs. Rank numbers go along
    the rows: `row * columns + column`.

    Args:
        rows: into so many blocks the replicas are cut.
        columns: into so many blocks the IPUs are cut.
        row, column: the rank's own block of each.
    """

    rows: int
    columns: int
    row: int
    column: int

    @property
    def rank(self) -> int:
        """The number of the rank on the mesh."""
        return self.row * self.columns + self.column

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return self.rows * self.columns

    @property
    def of_row(self) -> range:
        """The ranks that run the same replicas, this one included."""
        return range(self.row * self.columns, (self.row + 1) * self.columns)

    @property
    def of_column(self) -> range:
        """The ranks that run the same IPUs, this one included."""
        return range(self.column, self.ranks, self.columns)

    def of_rank(self, rank: int) -> "Share":
        """The share of another rank of the mesh."""
        return Share(self.rows, self.columns, *divmod(rank, self.columns))

    def replicas(self, count: int) -> range:
        """The replicas that the rank runs, of so many: a multiple of `rows`."""
        own = count // self.rows
        return range(self.row * own, (self.row + 1) * own)

    def ipus(self, count: int) -> range:
        """The IPUs that the rank runs, of so many: at least `columns`.

        IPU `i` is in column `i * columns // count`.
        """
        first, end = (
            -(-column * count // self.columns) for column in (self.column, self.column + 1)
        )
        return range(first, end)

    def column_of(self, ipu: int, count: int) -> int:
        """The column whose ranks run an IPU, of so many."""
        return ipu * self.columns // count

    def rank_of(self, replica: int, ipu: int, replicas: int, ipus: int) -> int:
        """The rank that runs an IPU of a replica, of so many replicas and IPUs."""
        row = replica * self.rows // replicas
        return row * self.columns + self.column_of(ipu, ipus)


@dataclass(frozen=True, slots=True)
class OwnReplicas:
    """The replicas of a program that one process runs: `own`, of `count` in all.

    Tensors, registers and streams have places for own replicas only. Groups, random numbers and
    divisors go by the numbers and the count of the program.
    """

    own: range
    count: int

    @classmethod
    def all(cls, count: int) -> Self:
        """All replicas of a program, in one process."""
        return cls(range(count), count)

    @property
    def places(self) -> range:
        """The places of own replicas in lists of them."""
        return range(len(self.own))

    def members(self, groups: ReplicaGroups | None) -> tuple[tuple[int, ...], ...]:
        """The places of own replicas, by group; None: all replicas are one."""
        if groups is None:
            return (tuple(self.places),)
        first = self.own.start
        every = groups.members(self.count)
        own = (tuple(r - first for r in group if r in self.own) for group in every)
        return tuple(group for group in own if group)

    def holders(self, variable: Variable) -> tuple[int, ...]:
        """The places of replicas with a tensor of their own; others share that of one of these."""
        if variable.groups is None:
            return (0,) if variable.replicated else tuple(self.places)
        return tuple(members[0] for members in self.members(variable.groups))

    def groups_of(self, groups: ReplicaGroups) -> tuple[int, ...]:
        """For each own replica, the number of its group in the program."""
        return groups.of(self.count)[self.own.start : self.own.stop]
