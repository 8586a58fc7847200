"""Perform an optimiser step in place: prepared once, a call only launches operators."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import foreach_add_
from ipu_dynamo.ops.updates.update_kernels import KERNELS
from ipu_dynamo.program.ir.update_rules import Rule
from ipu_dynamo.runtime.update.gradient_scale import GradientScale
from ipu_dynamo.runtime.update.rounding import HalfRounder
from ipu_dynamo.runtime.update.update_tensors import batches, distinct


class ParameterUpdate:
    """The update of one group's parameters on one device.

    Invariant: it reads and writes the memory of the tensors it was made from, for its whole life.
    Calls need no `torch.no_grad`, and one at a time may run.

    Args:
        rule: the equations, one of those with a kernel.
        parameters, gradients: aligned lists. A parameter whose gradient is None is left alone,
            and so are its states. A call overwrites the gradients.
        states: for every state of the rule, by its name, a list aligned with `parameters`;
            `new_states` of `update_tensors.py` makes them.
        scale: the divisor of the gradients; None for 1.
        rounding: how half parameters are written; None rounds to the nearest.

    Raises:
        ValueError: tensors that do not fit each other, or are not real floating-point ones.
    """

    def __init__(
        self,
        rule: Rule,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        states: Mapping[str, Sequence[Tensor]],
        *,
        scale: GradientScale | None = None,
        rounding: HalfRounder | None = None,
    ) -> None:
        divisor = None if scale is None else scale.tensor
        self._batches = batches(
            rule, parameters, gradients, states, rounding, divided=divisor is not None
        )
        self._kernels = tuple(
            KERNELS[rule.kind](
                rule.flags,
                batch.parameters,
                batch.gradients,
                batch.states,
                batch.scale_by(divisor),
            )
            for batch in self._batches
        )
        steps = [step for batch in self._batches for step in batch.states.get("step", [])]
        self._count = _counting(distinct(steps))
        self._values: list[float] = []

    def __call__(self, values: Sequence[float]) -> None:
        """Make a step with `values`, the numbers of `rule.hyperparameters` in that order.

        The learning rate may be a 0-dim tensor; one that is not on the CPU is waited for.
        """
        self.prepare(values)
        self.write()

    def prepare(self, values: Sequence[float]) -> None:
        """Do the part of a step before its writes to parameters or states."""
        self._values = list(map(float, values))
        for batch in self._batches:
            batch.load()

    def write(self) -> None:
        """Write parameters and states, as `prepare` has left the gradients."""
        self._count()
        for kernel, batch in zip(self._kernels, self._batches, strict=True):
            kernel(*self._values)
            batch.store()

    def reload(self) -> None:
        """Take notice that the states were overwritten, by a checkpoint for instance."""
        for kernel in self._kernels:
            kernel.reload()


def _counting(counters: Sequence[Tensor]) -> Callable[[], object]:
    """Return a callable that adds 1 to every counter.

    The 1 is a tensor: a Python number would become a tensor at every step.
    """
    if not counters:
        return lambda: None
    one = torch.ones((), device=counters[0].device)
    if len(counters) == 1:
        return partial(counters[0].add_, one)
    return partial(foreach_add_, counters, one, alpha=1.0)
