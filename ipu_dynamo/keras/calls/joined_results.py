"""Split the joined results of a call into those of single batches."""

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ipu_dynamo.capture.private.tracing import flatten

Results = Any  # of a step on one replica: a dict of logs, or nested outputs


class JoinedResults:
    """How the results of a program are joined.

    Args:
        shapes: of the tensors of one batch, in order.
        replicas: of the program.
        behind_loss: the program returns the loss before the results; it is dropped.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], replicas: int, *, behind_loss: bool
    ) -> None:
        self._shapes, self._replicas = [torch.Size(shape) for shape in shapes], replicas
        self._behind_loss = behind_loss

    def steps(self, results: Any) -> "StepResults":
        """For each step the results of every replica."""
        leaves, spec = flatten(results)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        columns = {
            place: self._batches(leaves[place], shape)
            for place, shape in zip(places, self._shapes, strict=True)
        }

        def single(row: int) -> Results:
            own = [columns[i][row] if i in columns else leaf for i, leaf in enumerate(leaves)]
            rebuilt = spec.unflatten(own)
            return rebuilt[1] if self._behind_loss else rebuilt

        def whole() -> Results:
            rows = {place: column.flatten(0, 1) for place, column in columns.items()}
            return spec.unflatten([rows.get(i, leaf) for i, leaf in enumerate(leaves)])

        count = max((len(column) for column in columns.values()), default=self._replicas)
        return StepResults(single, whole, count, self._replicas)

    @staticmethod
    def _batches(joined: Tensor, shape: torch.Size) -> Tensor:
        """The tensors of single batches, in order along a new first dimension."""
        if not shape.numel():
            rows = shape[0] if shape else 1
            count = len(joined) // rows if rows else 1
            return joined.reshape(count, *shape)
        return joined.reshape(-1, *shape)


class StepResults(Sequence[Sequence[Results]]):
    """The results of steps, each made when it is read: reading the last one makes no other.

    Args:
        single: makes the results of a batch.
        whole: makes those of all batches as one, with their rows in order.
        count: of batches.
        replicas: batches of a step.
    """

    def __init__(
        self,
        single: Callable[[int], Results],
        whole: Callable[[], Results],
        count: int,
        replicas: int,
    ) -> None:
        self._single, self.whole = single, whole
        self._count, self._replicas = count, replicas

    def __len__(self) -> int:
        return self._count // self._replicas

    @overload
    def __getitem__(self, step: int) -> Sequence[Results]: ...

    @overload
    def __getitem__(self, step: slice) -> Sequence[Sequence[Results]]: ...

    def __getitem__(self, step: int | slice) -> Any:
        if isinstance(step, slice):
            return [self[number] for number in range(*step.indices(len(self)))]
        first = range(len(self))[step] * self._replicas
        return [self._single(row) for row in range(first, first + self._replicas)]
