"""Apply updates that were traced from Python: call functions, and keep their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ipu_dynamo.ops.private.native import foreach_copy_
from ipu_dynamo.runtime.update.gradient_scale import GradientScale
from ipu_dynamo.runtime.update.rounding import HalfRounder
from ipu_dynamo.runtime.update.rows import row_of

Hyperparameters = Sequence[Sequence[float]]
Run = Callable[[list[Tensor]], Sequence[Tensor | None]]
_GRADIENTS = 1  # index in the inputs of an update: weights, gradients, states


class TracedFactors:
    """The numbers of a step: `compute` before its micro-batches, `write` with its updates.

    Args:
        run: the function of hyperparameters and counters.
        hyperparameters: group and place in there of each, with its dtype.
        counters: tensors to which `write` copies the next counts.
        results: 0-dim tensors that `compute` writes.
    """

    def __init__(
        self,
        run: Run,
        hyperparameters: Sequence[tuple[int, int, torch.dtype]],
        counters: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> None:
        self._run, self._hyperparameters = run, tuple(hyperparameters)
        self._counters, self.results = list(counters), list(results)
        self._next: list[Tensor] = []

    def compute(self, numbers: Hyperparameters) -> bool:
        """Compute the numbers of the next step; return whether the update was traced for them."""
        given = []
        for group, place, dtype in self._hyperparameters:
            number = numbers[group][place]
            if not (dtype.is_floating_point or float(number).is_integer()):
                return False  # it was traced for a whole number
            given.append(torch.tensor(number, dtype=dtype))
        try:
            *made, holds = self._run([*given, *self._counters])
        except RuntimeError as error:
            if "ZeroDivisionError" in str(error):
                return False  # it divides by a count that another variant begins
            raise
        if holds is None or not holds.item():
            return False
        values = [value for value in made if value is not None]
        count = len(self.results)
        if count:
            foreach_copy_(self.results, values[:count])
        self._next = values[count:]
        return True

    def write(self) -> None:
        """Count."""
        if self._counters:
            foreach_copy_(self._counters, self._next)


class CompleteGradient:
    """A summed gradient that is divided before the functions of an update take it.

    Args:
        total: the sum.
        gradient: the functions' argument; `total` is divided into it, or is it.
        scale: the divisor; None for 1.
    """

    def __init__(self, total: Tensor, gradient: Tensor, scale: GradientScale | None) -> None:
        self._total, self.gradient, self._scale = total, gradient, scale

    @property
    def is_divided(self) -> bool:
        """Whether there is nothing to do."""
        return self.gradient is self._total and self._scale is None

    def divide(self) -> None:
        """Divide it."""
        if self.gradient is not self._total:
            self.gradient.copy_(self._total)
        if self._scale is not None:
            self._scale.follow()
            self.gradient.div_(self._scale.tensor)


class TracedValues:
    """The results of a function at the end of a step: inputs of others, and lasting variables.

    Args:
        run: the function.
        arguments: its inputs.
        results: tensors for its results; `write` writes those of lasting variables.
        lasting: the last results are these variables' next values.
    """

    def __init__(
        self,
        run: Run,
        arguments: Sequence[Tensor],
        results: Sequence[Tensor],
        lasting: Sequence[Tensor] = (),
    ) -> None:
        self._run, self._arguments = run, list(arguments)
        self._results, self._lasting = list(results), list(lasting)
        self._next: list[Tensor] = []

    def compute(self) -> None:
        """Compute all."""
        values = [value for value in self._run(list(self._arguments)) if value is not None]
        count = len(self._results)
        if count:
            foreach_copy_(self._results, values[:count])
        self._next = values[count:]

    def write(self) -> None:
        """Write the lasting variables."""
        if self._lasting:
            foreach_copy_(self._lasting, self._next)


@dataclass(frozen=True)
class TracedParameter:
    """The tensors that one call reads and writes."""

    weight: Tensor
    gradient: Tensor
    states: tuple[Tensor, ...]
    numbers: tuple[Tensor, ...]


class JoinedUpdate:
    """The update of many small parameters by one call.

    Their elements are copied into a row, except gradients and states that are in one already.

    Args:
        run: the function for so many elements, which writes its arguments.
        parameters: with the same numbers.
    """

    def __init__(self, run: Run, parameters: Sequence[TracedParameter]) -> None:
        self._run, self._numbers = run, list(parameters[0].numbers)
        columns = [[p.weight, p.gradient, *p.states] for p in parameters]
        sizes = [p.weight.numel() for p in parameters]
        self._rows: list[Tensor] = []
        self._dense: list[tuple[list[Tensor], Tensor]] = []  # flat views of a column, and its row
        self._other: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._new: list[Tensor] = []  # parts of the rows, in their tensors' shapes
        self._targets: list[Tensor] = []
        self._written: list[Tensor] = []  # where they lie
        for place, own in enumerate(zip(*columns, strict=True)):
            changes = place != _GRADIENTS
            if (row := row_of(own)) is not None:
                self._rows.append(row)
                self._written += own if changes else ()
                continue
            row = torch.empty(sum(sizes), dtype=own[0].dtype, device=own[0].device)
            parts = [p.view(t.shape) for p, t in zip(row.split(sizes), own, strict=True)]
            self._rows.append(row)
            if all(tensor.is_contiguous() for tensor in own):
                self._dense.append(([tensor.detach().view(-1) for tensor in own], row))
            else:
                self._other[0].extend(parts)
                self._other[1].extend(own)
            if changes:
                self._new += parts
                self._targets += own

    def write(self) -> None:
        """Write weights and states."""
        for flat, row in self._dense:
            torch.cat(flat, out=row)
        if self._other[0]:
            foreach_copy_(*self._other)
        self._run([*self._rows, *self._numbers])
        if self._targets:
            foreach_copy_(self._targets, self._new)
        increment_version(self._written)


class TracedParameterUpdate:
    """The update of parameters by one function, which writes them and their states in place.

    Args:
        run: the function. It returns the weight in float32 if `rounding` writes it. None: there are
            no parameters.
        rounding: writes weights in half precision.
        together: updates of others.
    """

    def __init__(
        self,
        run: Run | None,
        parameters: Sequence[TracedParameter],
        rounding: HalfRounder | None,
        together: Sequence[JoinedUpdate] = (),
    ) -> None:
        self._run, self._parameters, self._rounding = run, tuple(parameters), rounding
        self._together = tuple(together)

    def write(self) -> None:
        """Write weights and states."""
        for joined in self._together:
            joined.write()
        for one in self._parameters:
            assert self._run is not None
            made = self._run([one.weight, one.gradient, *one.states, *one.numbers])
            if self._rounding is not None:
                (new,) = made
                assert new is not None
                self._rounding.store([one.weight], [new])
