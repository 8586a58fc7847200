"""Copy weights between the host's tensors and a program, with the slices that a user asks for."""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from ipu_dynamo.ops.private.locks import nested_lock
from ipu_dynamo.ops.private.native import DisableTorchFunctionSubclass
from ipu_dynamo.whole_step.compiled_model import CompiledModel

_host_lock = nested_lock()


def host_lock() -> threading.RLock:
    """The lock to hold while weights of the host are copied, or change their class.

    It is taken last: who holds it touches no module or tensor that another executor trains, since
    that may wait for the executor's lock.
    """
    return _host_lock


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


class HostWeights:
    """The weights of a program and the host's tensors, for a `DualView`.

    Args:
        core: the compiled program.
        slices: the parameters that come back with a slice for each replica.
    """

    def __init__(self, core: CompiledModel, slices: ReplicaSlices) -> None:
        self._core, self._slices = core, slices

    @property
    def written(self) -> frozenset[str]:
        """The weights that a call may change."""
        return self._core.written

    def weights(self) -> Mapping[str, Tensor]:
        """The host's tensors by name."""
        return self._core.weights()

    def has_weights(self) -> bool:
        """Whether the program's weights are those of a complete step."""
        return self._core.has_weights()

    def read_weights(self, names: Collection[str]) -> None:
        """Copy weights to the host's tensors."""
        tensors = self._core.weights()
        fetched = {id(tensors[name]) for name in names}
        with (
            host_lock(),
            DisableTorchFunctionSubclass(),
            self._slices.one_for_each_group(fetched),
        ):
            self._core.read_weights(names)

    def write_weights(self, names: Collection[str]) -> None:
        """Copy weights to the program."""
        with host_lock(), DisableTorchFunctionSubclass(), self._slices.one_for_each_group():
            self._core.write_weights(names)


def first_of_groups(group_of: tuple[int, ...]) -> list[int]:
    """The first replica of every group."""
    return [group_of.index(group) for group in range(max(group_of) + 1)]
