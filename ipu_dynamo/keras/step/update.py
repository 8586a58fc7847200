"""Trace an optimiser's `stateless_apply` into the program: any class, by one function of all
gradients, weights and states.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.errors import CompileError
from ipu_dynamo.keras.private.stateless_names import (
    all_tracked,
    inner_optimizers,
    tensor_of,
    trained_variables,
)
from ipu_dynamo.keras.step.assigned_weights import Receivers
from ipu_dynamo.keras.step.conditions import conditions_merged
from ipu_dynamo.keras.step.portable_methods import portable_methods
from ipu_dynamo.keras.step.step_scope import outside_variables
from ipu_dynamo.keras.step.step_variables import Names, StepVariable
from ipu_dynamo.keras.step.tracing import Constants
from ipu_dynamo.whole_step.optimizer.function_update import TracedUpdate


def traced_update(
    optimizer: Any,
    variables: Sequence[StepVariable],
    receivers: Receivers | None = None,
    outside: Iterable[Any] = (),
) -> tuple[TracedUpdate, "UpdateTrace"]:
    """The update of an optimiser, on the states that its variables hold.

    Args:
        variables: of the step.
        receivers: of those that the step assigns.
        outside: as in `optimizer_states`.
    """
    states = optimizer_states(optimizer, variables, outside)
    trace = UpdateTrace(optimizer, variables, receivers or {}, states)
    return TracedUpdate({name: tensor_of(v).detach() for name, v in states.items()}, trace), trace


def optimizer_states(
    optimizer: Any, variables: Sequence[StepVariable], outside: Iterable[Any] = ()
) -> dict[str, Any]:
    """The optimiser's variables that are states of the update, by name in the program.

    One that belongs to a variable of the model is called as that, a dot and a word.

    Args:
        outside: variables that the update reads, and the optimiser does not have.
    """
    scales = {id(v.variable) for v in variables if v.role == "scale"}
    trained = [v for v in variables if v.role == "trained"]
    paths = {v.variable.path.replace("/", "_") + "_": v.name for v in trained}
    names = Names(optimizer.name)
    states: dict[str, Any] = {}
    with all_tracked(optimizer):
        variables_of_all = optimizer.variables
    for variable in variables_of_all:
        if id(variable) in scales:
            continue
        owners = [path for path in paths if variable.name.startswith(path)]
        if owners:
            path = max(owners, key=len)
            name = f"{paths[path]}.{variable.name.removeprefix(path)}"
            if name in states:
                name = f"{name}_{len(states)}"
        else:
            name = f"optimizer.{names.of(variable.path).replace('.', '_')}"
        states[name] = variable
    for variable in outside:
        states[f"optimizer.{names.of(variable.path).replace('.', '_')}"] = variable
    return states


class UpdateTrace:
    """The update that a `TracedUpdate` calls while it is traced.

    Attributes:
        without_state: a variable of Keras that the last trace read, and that is no state; None: it
            read none.
        constants: arrays that it read.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[StepVariable],
        receivers: Receivers,
        states: dict[str, Any],
    ) -> None:
        self.without_state: Any = None
        self.constants = Constants(tensors=False)  # those of the trace are no fakes
        self._optimizer, self._states = optimizer, states
        self._receivers = {variable.name: name for variable, name in receivers.items()}
        names = {id(v.variable): v.name for v in variables if v.role in ("trained", "scale")}
        self._trained = trained_variables(optimizer)
        self._names = [names.get(id(variable)) for variable in self._trained]
        self._scales = {id(v.variable): v.name for v in variables if v.role == "scale"}

    def __call__(
        self,
        gradients: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        numbers: Mapping[str, Any],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """New weights and states, by Keras' own `stateless_apply`."""
        with all_tracked(self._optimizer):
            return self._applied(gradients, weights, states)

    def _applied(
        self,
        gradients: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        optimizer, state_of = self._optimizer, {id(v): n for n, v in self._states.items()}
        values = [
            weights[self._scales[id(v)]] if id(v) in self._scales else states[state_of[id(v)]]
            for v in optimizer.variables
        ]
        weights = {**weights, **self._assigned(gradients)}
        present = [self._weight(v, name, weights) for v, name in self._pairs()]
        grads = [None if name is None else gradients.get(name) for name in self._names]
        own = {id(v) for v in (*optimizer.variables, *self._trained)}
        more = {id(v): states[name] for name, v in self._states.items() if id(v) not in own}

        def outside(variable: Any) -> Tensor | None:
            return None if id(variable) in own else self._outside(variable, more)

        with ExitStack() as stack:
            stack.enter_context(portable_methods(optimizer))
            stack.enter_context(conditions_merged())
            stack.enter_context(outside_variables(outside, partial(_refuse_assignment, own)))
            stack.enter_context(self.constants)
            new_weights, new_values = optimizer.stateless_apply(values, grads, present)
        changed: dict[str, Tensor] = {}
        for (_, name), old, new in zip(self._pairs(), present, new_weights, strict=True):
            is_new = new is not old or self._receivers.get(name or "") in gradients
            if name is not None and name in weights and is_new:
                changed[name] = new
        new_states: dict[str, Tensor] = {}
        for variable, old, new in zip(optimizer.variables, values, new_values, strict=True):
            if new is old:
                continue
            if id(variable) in self._scales:
                changed[self._scales[id(variable)]] = new
            else:
                new_states[state_of[id(variable)]] = new
        return changed, new_states

    def _outside(self, variable: Any, known: Mapping[int, Tensor]) -> Tensor:
        """The value of a variable that the optimiser does not have, as one that a schedule reads.

        Raises:
            CompileError: it is no state yet.
        """
        if id(variable) not in known:
            self.without_state = variable
            raise CompileError(
                f"the update of {self._optimizer.name} reads {variable.path}, which is no variable "
                "of the optimizer",
                hint="make it by the optimizer's add_variable",
            )
        return known[id(variable)]

    def _assigned(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values that the step has assigned to weights, by their names."""
        pairs = self._receivers.items()
        return {name: gradients[of] for name, of in pairs if of in gradients}

    def _pairs(self) -> list[tuple[Any, str | None]]:
        return list(zip(self._trained, self._names, strict=True))

    def _weight(self, variable: Any, name: str | None, weights: Mapping[str, Tensor]) -> Tensor:
        """A weight; for one without a gradient zeros of its type, as only the type is read."""
        if name is not None and name in weights:
            return weights[name]
        if any(getattr(one, "use_ema", False) for one in inner_optimizers(self._optimizer)):
            raise CompileError(
                f"the optimizer averages {variable.path}, which has no gradient",
                hint="set layer.trainable = False before compile, or use_ema=False",
            )
        return torch.zeros(tuple(variable.shape), dtype=tensor_of(variable).dtype)


def _refuse_assignment(own: Collection[int], variable: Any) -> None:
    """Refuse, in an update, assignments to variables that are not the optimiser's.

    Raises:
        CompileError: it would be lost with the scope.
    """
    if id(variable) not in own:
        raise CompileError(
            f"the update assigns {variable.path}, which is no variable of the optimizer",
            hint="make it by the optimizer's add_variable, or compute it from optimizer.iterations",
        )
