"""Divide replicas into groups, whose members share weights or read the same data."""

import re
from dataclasses import dataclass
from typing import Self

_TEXT = re.compile(r"group of (?:(1) replica|(\d+) (consecutive|orthogonal) replicas)")


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """Groups of `size` replicas each. The size divides the number of replicas.

    With R replicas there are m = R / size groups. Consecutive ones are `{0, ..., size - 1}`,
    `{size, ..., 2 * size - 1}`, and so on; orthogonal ones are `{0, m, 2m, ...}`,
    `{1, m + 1, 2m + 1, ...}`, and so on. Prints as one of its groups,
    `group of 2 consecutive replicas`; `parse` is the inverse.

    Args:
        size: replicas in each group.
        orthogonal: groups are strided, not consecutive replicas.

    Source: PopTorch user guide, "Grouping tensor weights across replicas".
    """

    size: int = 1
    orthogonal: bool = False

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"a group has {self.size!r} replicas; they count from 1")

    def count(self, replicas: int) -> int:
        """How many groups there are.

        Args:
            replicas: number of all replicas.
        """
        return replicas // self.size

    def of(self, replicas: int) -> tuple[int, ...]:
        """The group of every replica.

        Args:
            replicas: number of all replicas.
        """
        groups = self.count(replicas)
        return tuple(r % groups if self.orthogonal else r // self.size for r in range(replicas))

    def members(self, replicas: int) -> tuple[tuple[int, ...], ...]:
        """The replicas of every group, ascending.

        Args:
            replicas: number of all replicas.
        """
        of = self.of(replicas)
        groups = range(self.count(replicas))
        return tuple(tuple(r for r in range(replicas) if of[r] == group) for group in groups)

    def are_whole(self, replicas: int, block: int) -> bool:
        """Whether blocks of so many consecutive replicas divide no group.

        Args:
            replicas: number of all replicas.
            block: how many replicas a block has.
        """
        groups = self.members(replicas)
        return all(members[0] // block == members[-1] // block for members in groups)

    def __str__(self) -> str:
        if self.size == 1:
            return "group of 1 replica"
        return f"group of {self.size} {_KINDS[self.orthogonal]} replicas"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `str`.

        Args:
            text: one printed group.

        Raises:
            ValueError: `text` is no printed group.
        """
        if (match := _TEXT.fullmatch(text)) is None:
            raise ValueError(f"not a group of replicas: {text!r}")
        return cls(int(match[1] or match[2]), match[3] == _KINDS[True])


_KINDS = {False: "consecutive", True: "orthogonal"}
