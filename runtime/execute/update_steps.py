"""Prepare the instructions of updates: launches of rules, and functions that were traced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ipu_dynamo.program import Function, JointUpdate, Program, TensorType, Update, UpdatePart
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.runtime.update.gradient_scale import GradientScale
from ipu_dynamo.runtime.update.parameter_update import ParameterUpdate
from ipu_dynamo.runtime.update.rounding import HalfRounder
from ipu_dynamo.runtime.update.rows import gains_in_a_row
from ipu_dynamo.runtime.update.traced_update import (
    CompleteGradient,
    JoinedUpdate,
    Run,
    TracedParameter,
    TracedParameterUpdate,
    TracedValues,
)

# Gives the divisor of gradients.
ScaleOf = Callable[[Sequence[Tensor]], GradientScale | None]


class RunUpdate(Protocol):
    """Makes callables of the functions of updates."""

    def updating(
        self, function: Function, device: torch.device, keep_weight: bool, once: bool
    ) -> Run:
        """A callable that writes the results of the function.

        Args:
            keep_weight: it returns the weight, to be rounded at random.
            once: it is called once only.
        """

    def joined(self, function: Function, device: torch.device, elements: int) -> Run | None:
        """Do the same for parameters of so many elements in a row; None: each needs its own."""

    def computing(self, function: Function) -> Run:
        """A callable that returns the results of the function."""


_FEW = 8  # parameters: for fewer the calls do not matter


class ParametersUpdate(Protocol):
    """An update of several parameters."""

    def prepare(self, hyperparameters: Hyperparameters) -> None:
        """Do the part of a step before its writes to parameters or states.

        Args:
            hyperparameters: of every update group.
        """

    def write(self) -> None:
        """Write parameters and states."""

    def reload(self) -> None:
        """Take notice that the states were overwritten."""


class RuleStep:
    """An update by a rule: its launch reads the hyperparameters of the group as floats."""

    def __init__(self, group: int, scale: GradientScale | None, update: ParameterUpdate) -> None:
        self._group, self._scale, self._update = group, scale, update
        self.write, self.reload = update.write, update.reload

    def prepare(self, hyperparameters: Hyperparameters) -> None:
        if self._scale is not None:
            self._scale.follow()
        self._update.prepare(hyperparameters[self._group])


class FunctionStep:
    """An update by a function, with the division of the gradients."""

    def __init__(self, divided: Sequence[CompleteGradient], update: TracedParameterUpdate) -> None:
        self._divided = tuple(gradient for gradient in divided if not gradient.is_divided)
        self.write = update.write

    def prepare(self, hyperparameters: Hyperparameters) -> None:
        """Divide the gradients that nothing before has divided."""
        for gradient in self._divided:
            gradient.divide()

    def reload(self) -> None:
        """Nothing to read again: every call reads all states."""


class UpdateSteps:
    """Makes callables of instructions.

    Args:
        tensors: for every variable and value, its tensor on each replica; gets computed values.
        devices: of the IPUs.
        rounding: of updates that round at random.
        run: makes callables of traced functions; None if no update has one.
        first: number of the first replica here among those of the program.
    """

    def __init__(
        self,
        program: Program,
        tensors: dict[str, list[Tensor]] | dict[str, Sequence[Tensor]],
        devices: Sequence[torch.device],
        rounding: HalfRounder,
        run: RunUpdate | None,
        first: int = 0,
    ) -> None:
        self._first = {v.name: first if v.groups is not None else 0 for v in program.variables}
        self._functions: Mapping[str, Function] = {f.name: f for f in program.update_functions}
        self._tensors, self._devices, self._rounding = tensors, devices, rounding
        self._run = run
        self._complete: dict[tuple[str, int], CompleteGradient] = {}

    def update(
        self, update: Update, places: Sequence[tuple[int, int]], scale_of: ScaleOf
    ) -> ParametersUpdate:
        """What updates parameters.

        Args:
            places: the places of parameters, each with a replica.
        """
        for place, replica in places:
            name = update.parameters[place]
            number = self._first[name] + replica  # the same on all ranks
            self._rounding.name(self._tensors[name][replica], f"{name} {number}")
        if update.function is None:
            return self._by_rule(update, places, scale_of)
        return self._by_function(update, update.function, places, scale_of)

    def _by_rule(
        self, update: Update, places: Sequence[tuple[int, int]], scale_of: ScaleOf
    ) -> RuleStep:
        def copies(names: Sequence[str]) -> list[Tensor]:
            return [self._tensors[names[place]][replica] for place, replica in places]

        gradients = copies(update.gradients)
        scale = scale_of(gradients)
        step = ParameterUpdate(
            update.rule,
            copies(update.parameters),
            gradients,
            {state: copies(names) for state, names in update.states},
            scale=scale,
            rounding=self._rounding if update.rounding == "stochastic" else None,
        )
        return RuleStep(update.group, scale, step)

    def _by_function(
        self, update: Update, name: str, places: Sequence[tuple[int, int]], scale_of: ScaleOf
    ) -> FunctionStep:
        assert self._run is not None
        columns = [update.parameters, *(names for _, names in update.states)]
        function = self._functions[name]
        parameters, keys = [], []
        for place, replica in places:
            weight, *states = (self._tensors[names[place]][replica] for names in columns)
            keys.append((update.gradients[place], replica))
            gradient = self._gradient_for(keys[-1], weight, function)
            numbers = tuple(self._tensors[name][0] for name in update.numbers[place])
            parameters.append(TracedParameter(weight, gradient, tuple(states), numbers))
        divided = self._to_divide(keys, [one.gradient for one in parameters], scale_of)
        weight = parameters[0].weight
        at_random = update.rounding == "stochastic" and weight.dtype == torch.float16
        together: list[JoinedUpdate] = []
        if not at_random and not update.once:
            together, parameters = self._joined(function, parameters)
        run = None
        if parameters:
            run = self._run.updating(function, weight.device, at_random, update.once)
        rounding = self._rounding if at_random else None
        step = TracedParameterUpdate(run, parameters, rounding, together)
        return FunctionStep(divided, step)

    def _joined(
        self, function: Function, parameters: Sequence[TracedParameter]
    ) -> tuple[list[JoinedUpdate], list[TracedParameter]]:
        """Return joint updates of many small parameters, and the parameters that are left.

        A parameter is joined only if its inputs besides weight, gradient and states are scalars. In
        a row, elements of another tensor would not be next to the parameter's own.
        """
        assert self._run is not None
        alike: dict[tuple[int, ...], list[TracedParameter]] = {}
        together, left = [], []
        for one in parameters:
            if any(number.dim() for number in one.numbers):
                left.append(one)
            else:
                alike.setdefault(tuple(map(id, one.numbers)), []).append(one)
        for group in alike.values():
            weight, run = group[0].weight, None
            if len(group) >= _FEW and gains_in_a_row(weight):
                elements = sum(one.weight.numel() for one in group)
                run = self._run.joined(function, weight.device, elements)
            if run is None:
                left += group
            else:
                together.append(JoinedUpdate(run, group))
        return together, left

    def part(self, part: UpdatePart, scale_of: ScaleOf) -> Callable[[], None]:
        """Return a callable that computes the results of a part, which other updates need."""
        assert self._run is not None
        function, key = self._functions[part.function], (part.gradient, 0)
        weight = self._tensors[part.parameter][0]
        gradient = self._gradient_for(key, weight, function)
        divided = self._to_divide([key], [gradient], scale_of)
        rest = [self._tensors[name][0] for name in (*part.states, *part.numbers)]
        results = self._results(part.results, part.types, part.ipu)
        values = TracedValues(self._run.computing(function), [weight, gradient, *rest], results)

        def compute() -> None:
            for one in divided:
                one.divide()
            values.compute()

        return compute

    def joint(self, joint: JointUpdate) -> TracedValues:
        """The step of a joint part, which reads several parameters."""
        assert self._run is not None
        arguments = [self._tensors[name][0] for name in joint.arguments]
        lasting = [self._tensors[name][0] for name in joint.written]
        results = self._results(joint.results, joint.types, joint.ipu)
        run = self._run.computing(self._functions[joint.function])
        return TracedValues(run, arguments, results, lasting)

    def _results(self, names: Sequence[str], types: Sequence[TensorType], ipu: int) -> list[Tensor]:
        device = self._devices[ipu]
        made = [torch.zeros(type_.shape, dtype=type_.dtype, device=device) for type_ in types]
        for name, tensor in zip(names, made, strict=True):
            self._tensors[name] = [tensor]
        return made

    def _gradient_for(self, key: tuple[str, int], weight: Tensor, function: Function) -> Tensor:
        """The gradient that a function takes: the accumulator if it fits, else room for a copy."""
        if key in self._complete:
            return self._complete[key].gradient
        name, replica = key
        total, dtype = self._tensors[name][replica], function.inputs[1].dtype
        same = total.dtype == dtype and total.stride() == weight.stride()
        return total if same else torch.empty_like(weight, dtype=dtype)

    def _to_divide(
        self,
        keys: Sequence[tuple[str, int]],
        gradients: Sequence[Tensor],
        scale_of: ScaleOf,
    ) -> list[CompleteGradient]:
        """Those of some gradients that no instruction before this one divides."""
        scale = scale_of(gradients)
        found = []
        for key, gradient in zip(keys, gradients, strict=True):
            if key not in self._complete:
                name, replica = key
                complete = CompleteGradient(self._tensors[name][replica], gradient, scale)
                self._complete[key] = complete
                found.append(complete)
        return found
