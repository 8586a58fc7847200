"""Show an optimizer's state on the device under PopTorch's names, and take it back from them.

Between two steps accumulators are zero. The velocity of SGD is the one that the device would hold:
multiplied by the loss scale or, if it shares the accumulator, prepared for the next step.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.ops.private.locks import QueueLock
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch._logging import logger
from poptorch.errors import createPoptorchError
from poptorch.host_weights import ReplicaSlices, first_of_groups
from poptorch.optim import GroupReading, Reading
from poptorch.optimizer_table import has_accumulator, numbers_of, states_of, zeros_of
from poptorch.tensor_names import LOSS_SCALING, SPECIFIC, UPDATE_FACTOR


class StateOnDevice:
    """The state that a compiled model holds for an optimizer.

    Args:
        core: the compiled model.
        reading: the optimizer's numbers that are in force.
        lock: of the executor, which orders reads and calls.
        slices: the parameters that come back with a slice for each replica.
    """

    def __init__(
        self, core: CompiledModel, reading: Reading, lock: QueueLock, slices: ReplicaSlices
    ) -> None:
        self._core, self.reading, self._lock, self._of_replicas = core, reading, lock, slices

    def follow(self, reading: Reading, factor: float) -> None:
        """Take over new numbers; multiply the loss scale, which may be automatic, by `factor`."""
        self.reading = reading
        if factor != 1:
            self._core.set_loss_scale(self._core.loss_scale * factor)

    def read_optimizer_state(self) -> dict[str, Any]:
        """Copies of everything in host memory, by name, after the step that may be running."""

        def read() -> dict[str, Any]:
            self._core.bring_states()
            now = self.states_now()
            tensors = {name: value.to("cpu", copy=True) for name, value in now.items()}
            return {"ipu_state": tensors, "ipu_param": self.numbers_now()}

        return self._lock.run(read)

    def write(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite the device's state; missing tensors keep their values, with a warning."""
        missing = [name for name in self.states_now() if name not in state]
        if missing:
            logger.warning("The optimizer's state lacks %s: kept as it is", ", ".join(missing))
        if UPDATE_FACTOR in state and self._core.options.automatic_loss_scaling is not None:
            self._core.set_loss_scale(float(state[UPDATE_FACTOR]) * self._loss_scaling)
        held, taken = self._core.states(), dict[str, dict[str, Tensor]]()
        for group, name in self._trained():
            for own, theirs in states_of(self.reading, group).items():
                shown = f"{theirs}___{name}"
                target = held.get(name, {}).get(own)
                if target is not None and shown in state:
                    value = self._of_groups(state[shown].to(target.device), target, name)
                    _check_shape(shown, value, target)
                    taken.setdefault(name, {})[own] = self._taken(value, group, name)
        self._core.write_states(taken)

    @property
    def _combined(self) -> bool:
        return self.reading.kind == "sgd" and bool(self.reading.settings["use_combined_accum"])

    @property
    def _loss_scaling(self) -> float:
        return float(self.reading.settings["loss_scaling"])

    def _trained(self) -> Iterator[tuple[GroupReading, str]]:
        """The trained parameters, with the group that each belongs to."""
        trained = self._core.value_names.updates
        for reading, group in zip(self.reading.groups, self._core.groups, strict=True):
            yield from ((reading, name) for name in group.parameters if name in trained)

    # values

    def states_now(self) -> dict[str, Tensor]:
        """The state by name, while no step runs: the device's tensors, or made from them."""
        held, found = self._core.states(), {}
        for group, name in self._trained():
            of_parameter = held.get(name, {})
            for own, theirs in states_of(self.reading, group).items():
                if own in of_parameter:
                    shown = self._shown(of_parameter[own], group, name)
                    found[f"{theirs}___{name}"] = self._of_slices(shown, name)
            for text in zeros_of(self.reading, group):
                found[text.format(name)] = self._zeros(name)
        if self._core.options.automatic_loss_scaling is not None:
            found[UPDATE_FACTOR] = torch.tensor(self._core.loss_scale / self._loss_scaling)
        return found

    def tensors_now(self) -> dict[str, Tensor]:
        """The state, and accumulators of gradients: these hold nothing between two steps."""
        accumulators = {
            f"Accum___{name}": self._zeros(name, self.reading.settings["accum_type"])
            for group, name in self._trained()
            if has_accumulator(self.reading, group, self._core.options)
        }
        return {**self.states_now(), **accumulators}

    def _zeros(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        like = self._core.executable.whole(name)
        return self._of_slices(torch.zeros_like(like, dtype=dtype), name)

    def _slices(self, name: str) -> tuple[int, ...]:
        """The group of every slice in which a parameter comes back; none: it has no groups."""
        groups = {v.name: v.groups for v in self._core.program.variables}[name]
        if groups is None:
            return ()
        rows = self._of_replicas.rows(self._core.weights()[name])
        return rows or tuple(range(groups.count(self._core.options.replicas)))

    def _of_slices(self, value: Tensor, name: str) -> Tensor:
        """A state of groups, or one number for all of them, with the slices that come back."""
        slices = self._slices(name)
        if not slices:
            return value
        return value[list(slices)] if value.dim() else value.expand(len(slices)).clone()

    def _of_groups(self, value: Tensor, held: Tensor, name: str) -> Tensor:
        """Inverse of `_of_slices`; a state that has a slice for each group stays as it is."""
        slices = self._slices(name)
        if not slices or value.dim() == 0 or len(value) != len(slices):
            return value
        return value[first_of_groups(slices)] if held.dim() else value[0]

    def _shown(self, value: Tensor, group: GroupReading, name: str) -> Tensor:
        """A state of the core as the device would have it."""
        if self.reading.kind != "sgd":
            return value
        if not self._combined:
            return value * self._core.loss_scale
        velocity, decay = self._next_velocity(group, name)
        return velocity * value + decay.to(value.dtype)

    def _taken(self, value: Tensor, group: GroupReading, name: str) -> Tensor:
        """Inverse of `_shown`."""
        if self.reading.kind != "sgd":
            return value
        if not self._combined:
            return value / self._core.loss_scale
        velocity, decay = self._next_velocity(group, name)
        return (value - decay) / velocity if velocity else torch.zeros_like(value)

    def _next_velocity(self, group: GroupReading, name: str) -> tuple[float, Tensor]:
        """With a shared accumulator: the factor on the velocity, and the term of the decay."""
        values = group.values
        scaling = values["velocity_scaling"]
        decay = (1 - values["dampening"]) * scaling * values["weight_decay"]
        return scaling * values["momentum"], self._core.executable.whole(name).double() * decay

    def numbers_now(self) -> dict[str, Tensor]:
        """The numbers in force by name, of every trained parameter for itself."""
        found = dict[str, Tensor]()
        for group, parameter in self._trained():
            for number, value in numbers_of(self.reading, group, self._core.options):
                like = self._core.executable.whole(parameter).dtype
                dtype = like if number.as_weight else torch.float32
                found[f"{number.name}{SPECIFIC}{parameter}"] = torch.tensor(value, dtype=dtype)
        if not self.reading.loss_scaling_is_constant:
            found[LOSS_SCALING] = torch.tensor(self._loss_scaling)
        return found


def _check_shape(name: str, value: Tensor, held: Tensor) -> None:
    if value.shape != held.shape:
        raise createPoptorchError(
            f"The optimizer's state {name} has shape {list(value.shape)}, and the model's "
            f"{list(held.shape)}: give the model an optimizer of its own",
            id="optimizer",
        )
