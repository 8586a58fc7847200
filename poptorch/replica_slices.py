"""Let parameters of groups of replicas come back to the host with a slice for each replica."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


class ReplicaSlices:
    """Parameters whose values come back as `VariableRetrievalMode.AllReplicas` asks.

    On the host such a parameter has a slice for each group, until its values have come back: then
    it has one for each replica. A program takes and gives one for each group.

    Args:
        parameters: each with the group of every replica.
    """

    def __init__(self, parameters: Iterable[tuple[Tensor, tuple[int, ...]]] = ()) -> None:
        self._parameters = {
            id(parameter): (parameter, group_of)
            for parameter, group_of in parameters
            if len(set(group_of)) < len(group_of)
        }

    def rows(self, parameter: Tensor) -> tuple[int, ...] | None:
        """The group of every slice that comes back; None: there is one for each group."""
        known = self._parameters.get(id(parameter))
        return None if known is None else known[1]

    @contextmanager
    def one_for_each_group(self, fetched: Collection[int] = ()) -> Iterator[None]:
        """Let parameters have a slice for each group, and afterwards the slices that they had; of
        several slices a group takes that of its first replica.

        Args:
            fetched: ids of tensors that get new values meanwhile: these have a slice for each
                replica afterwards.
        """
        before = {key: parameter.data for key, (parameter, _) in self._parameters.items()}
        try:
            for parameter, group_of in self._parameters.values():
                if len(parameter.data) == len(group_of):
                    parameter.data = parameter.data[first_of_groups(group_of)]
            yield
            for key, (parameter, group_of) in self._parameters.items():
                if key in fetched:
                    before[key] = parameter.data[list(group_of)]
        finally:
            for key, (parameter, _) in self._parameters.items():
                parameter.data = before[key]


def first_of_groups(group_of: tuple[int, ...]) -> list[int]:
    """The first replica of every group."""
    return [group_of.index(group) for group in range(max(group_of) + 1)]
