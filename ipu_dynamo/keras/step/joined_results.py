"""Take apart what the core joins: the results of single batches, of those of a call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.capture.private.tracing import flatten

Results = Any  # of a step on one replica: a dict of logs, or nested outputs


class JoinedResults:
    """How the results of a program are joined.

    Args:
        shapes: of the tensors of one batch, in order.
        replicas: of the program.
        behind_loss: the results stand behind the loss, which nobody asks for.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], replicas: int, *, behind_loss: bool
    ) -> None:
        self._shapes, self._replicas = [torch.Size(shape) for shape in shapes], replicas
        self._behind_loss = behind_loss

    def steps(self, results: Any) -> list[Sequence[Results]]:
        """For each step the results of every replica."""
        leaves, spec = flatten(results)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        columns = {
            place: self._batches(leaves[place], shape)
            for place, shape in zip(places, self._shapes, strict=True)
        }
        count = max((len(column) for column in columns.values()), default=self._replicas)
        singles = []
        for row in range(count):
            single = [columns[i][row] if i in columns else leaf for i, leaf in enumerate(leaves)]
            rebuilt = spec.unflatten(single)
            singles.append(rebuilt[1] if self._behind_loss else rebuilt)
        return [singles[i : i + self._replicas] for i in range(0, count, self._replicas)]

    @staticmethod
    def _batches(joined: Tensor, shape: torch.Size) -> Sequence[Tensor]:
        if not shape.numel():
            rows = shape[0] if shape else 1
            count = len(joined) // rows if rows else 1
            return joined.reshape(count, *shape).unbind(0)
        return joined.reshape(-1, *shape).unbind(0)
