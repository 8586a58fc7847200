"""Say which replicas and IPUs of a program a rank runs."""

from dataclasses import dataclass


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

    def rank_of(self, replica: int, ipu: int, replicas: int, ipus: int) -> int:
        """The rank that runs an IPU of a replica, of so many replicas and IPUs."""
        row, column = replica * self.rows // replicas, ipu * self.columns // ipus
        return row * self.columns + column
