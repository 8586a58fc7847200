"""Define the instructions of updates: those that compute first, and those that write.

`UpdateFactors` runs before the micro-batches of a step, and makes numbers of hyperparameters for
traced updates. An update may depend on the tensors of several parameters. Then the owner of each of
them computes a part (`UpdatePart`), one IPU joins the parts (`JointUpdate`), and updates take the
results as numbers. Parts and joints run once the gradients are complete, before any write.
"""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Literal

from ipu_dynamo.program.ir.base_instruction import (
    AFTER,
    BEFORE,
    BaseInstruction,
    Computed,
    Use,
    divisors,
    listed,
    made,
    used,
)
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_rules import Rule


@dataclass(frozen=True, slots=True)
class UpdateFactors(BaseInstruction):
    """Compute, before the micro-batches of a step, the numbers that its updates take.

    They depend on nothing that a micro-batch makes. So it is known before a step whether its
    updates are those that were traced for such numbers. Counters get their next values with the
    updates.

    Args:
        function: takes the hyperparameters and the counters; gives the results, the next counters,
            and whether the trace holds.
        hyperparameters: of every one its group, its place in there, and its name.
        counters: variables, numbers that the optimiser changes.
        results, types: what updates take.
    """

    sections = BEFORE

    function: str
    hyperparameters: tuple[tuple[int, int, str], ...]
    counters: tuple[str, ...]
    results: tuple[str, ...]
    types: tuple[TensorType, ...]
    ipu: int

    @property
    def columns(self) -> tuple[tuple[str, Sized], ...]:
        return (("results", self.results), ("types", self.types))

    @property
    def makes(self) -> tuple[Use, ...]:
        return made(self.results, self.types, self.ipu)

    @property
    def writes(self) -> tuple[Use, ...]:
        return used(self.counters, self.ipu, kinds=("state",))

    @property
    def computes(self) -> tuple[Computed, ...]:
        return (Computed("function", "", function=self.function),)

    def __str__(self) -> str:
        arguments = [f"{name} of group {group}" for group, _, name in self.hyperparameters]
        arguments += [f"%{name}" for name in self.counters]
        counts = f", counting {listed(self.counters)}" if self.counters else ""
        factors = f"factors @{self.function}({', '.join(arguments)}){counts}"
        return f"({listed(self.results)}) = {factors}  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class UpdatePart(BaseInstruction):
    """Compute values of one parameter that the updates of others read, too. Nothing is written.

    Args:
        function: takes weight, gradient, states and `numbers`, as that of an `Update`.
        parameter, gradient, states: variables, and an accumulator or a copy of it.
        numbers: its arguments from `UpdateFactors`, and from parts and joints before it.
        results, types: its results.
        divisor, loss_scale, clip: the gradient is divided by them, as in `Update`.
    """

    sections = AFTER

    function: str
    parameter: str
    gradient: str
    states: tuple[str, ...]
    numbers: tuple[str, ...]
    results: tuple[str, ...]
    types: tuple[TensorType, ...]
    divisor: float
    ipu: int
    loss_scale: str | None = None
    clip: str | None = None

    @property
    def columns(self) -> tuple[tuple[str, Sized], ...]:
        return (("results", self.results), ("types", self.types))

    @property
    def reads(self) -> tuple[Use, ...]:
        return (
            Use(self.parameter, self.ipu, kinds=("parameter",)),
            *used((self.gradient, *self.states, *self.numbers), self.ipu),
            *divisors(self.ipu, self.loss_scale, self.clip),
        )

    @property
    def makes(self) -> tuple[Use, ...]:
        return made(self.results, self.types, self.ipu)

    @property
    def computes(self) -> tuple[Computed, ...]:
        return (Computed("function", self.gradient, function=self.function),)

    def __str__(self) -> str:
        mean = f" / {self.divisor}" if self.divisor != 1 else ""
        for name in (self.loss_scale, self.clip):
            mean += f" / %{name}" if name else ""
        of = f"%{self.parameter} by %{self.gradient}{mean}"
        return f"({listed(self.results)}) = part @{self.function}({of})  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class JointUpdate(BaseInstruction):
    """Compute values that depend on several parameters.

    Args:
        function: takes `arguments`, returns `results`, and after them the new values of `written`.
        arguments: values and variables on this IPU.
        results, types: arguments of updates, and of parts after it.
        written: variables that belong to no parameter; they are written with the updates.
    """

    sections = AFTER

    function: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    types: tuple[TensorType, ...]
    written: tuple[str, ...]
    ipu: int

    @property
    def columns(self) -> tuple[tuple[str, Sized], ...]:
        return (("results", self.results), ("types", self.types))

    @property
    def reads(self) -> tuple[Use, ...]:
        return used(self.arguments, self.ipu)

    @property
    def makes(self) -> tuple[Use, ...]:
        return made(self.results, self.types, self.ipu)

    @property
    def writes(self) -> tuple[Use, ...]:
        return used(self.written, self.ipu, kinds=("state",))

    @property
    def computes(self) -> tuple[Computed, ...]:
        return (Computed("function", "", function=self.function),)

    def __str__(self) -> str:
        call = f"({listed(self.results)}) = joint @{self.function}({listed(self.arguments)})"
        written = f", writing {listed(self.written)}" if self.written else ""
        return f"{call}{written}  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class Update(BaseInstruction):
    """Apply one optimiser group's rule to the parameters that live on one IPU.

    Args:
        rule: the equations; its numbers (learning rate, ...) are read at run time.
        group: index of the parameter group whose numbers apply.
        ipu: owner of the parameters, their gradients and states.
        parameters: names of variables.
        gradients: names of accumulators, aligned with `parameters`.
        states: for each of the rule's states, the variables that hold it, aligned likewise.
        divisor: the gradients are divided by it first.
        clear: set the gradients, which are accumulators, to zero afterwards.
        rounding: of parameters in half precision: to the nearest, or up or down at random.
        sharded: the parameters of which each replica updates its shard only.
        loss_scale: a number on the IPU by which gradients are divided, too.
        clip: another one, which clips them.
        function: of a traced rule, the one that updates a parameter: takes weight, gradient, states
            and `numbers`, returns weight and states.
        numbers: for each parameter, the arguments from `UpdateFactors` and `JointUpdate`.
        once: it is for one step only, the first.
    """

    sections = AFTER

    rule: Rule
    group: int
    ipu: int
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    states: tuple[tuple[str, tuple[str, ...]], ...]
    divisor: float
    clear: bool
    rounding: Literal["nearest", "stochastic"] = "nearest"
    sharded: tuple[str, ...] = ()
    loss_scale: str | None = None
    clip: str | None = None
    function: str | None = None
    numbers: tuple[tuple[str, ...], ...] = ()
    once: bool = False

    @property
    def columns(self) -> tuple[tuple[str, Sized], ...]:
        return (
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            *self.states,
            *((("sets of numbers", self.numbers),) if self.function else ()),
        )

    @property
    def reads(self) -> tuple[Use, ...]:
        return (
            *used(self.gradients, self.ipu, shard=True),
            *divisors(self.ipu, self.loss_scale, self.clip),
            *used(tuple(n for names in self.numbers for n in names), self.ipu),
        )

    @property
    def writes(self) -> tuple[Use, ...]:
        return (
            *used(self.parameters, self.ipu, kinds=("parameter",), shard=True),
            *(
                use
                for _, names in self.states
                for use in used(names, self.ipu, kinds=("state",), shard=True)
            ),
            *(used(self.gradients, self.ipu, shard=True) if self.clear else ()),
        )

    @property
    def computes(self) -> tuple[Computed, ...]:
        return tuple(Computed("update", g, self.rule, self.function) for g in self.gradients)

    def __str__(self) -> str:
        pairs = ", ".join(
            f"{'shard of ' if p in self.sharded else ''}%{p} by %{g}"
            for p, g in zip(self.parameters, self.gradients, strict=True)
        )
        mean = f" / {self.divisor}" if self.divisor != 1 else ""
        for name in (self.loss_scale, self.clip):
            mean += f" / %{name}" if name else ""
        clear = ", clear" if self.clear else ""
        rounding = ", round at random" if self.rounding == "stochastic" else ""
        rule = f"traced @{self.function}" if self.function else str(self.rule)
        does = f"{rule}{mean}{clear}{rounding}"
        return f"update group {self.group} {does} ({pairs})  on ipu{self.ipu}"


@dataclass(frozen=True, slots=True)
class AdjustLossScale(BaseInstruction):
    """Halve the loss scale for the next step if many gradients were large, else double it.

    A scale that would leave `smallest` to `largest` stays as it is.

    Args:
        scale: variable, the loss scale.
        within: accumulators, set to zero afterwards: they count elements that are not large.
        watched: how many elements a step counts in all.
        share: halve if more than this share of them is large.
        smallest, largest: normal numbers of the loss's dtype.
        ipu: owner of the loss scale.
        period: do so once in so many steps, by what all of them counted.
        steps, so_far: variables: steps since the last change, and their count; None for a
            period of one step.
    """

    sections = AFTER

    scale: str
    within: tuple[str, ...]
    watched: int
    share: float
    smallest: float
    largest: float
    ipu: int
    period: int = 1
    steps: str | None = None
    so_far: str | None = None

    @property
    def writes(self) -> tuple[Use, ...]:
        own = (self.scale, *filter(None, (self.steps, self.so_far)))
        return (*used(own, self.ipu, kinds=("loss_scale",)), *used(self.within, self.ipu))

    @property
    def computes(self) -> tuple[Computed, ...]:
        return (Computed("factor", self.scale),)

    def __str__(self) -> str:
        every = f"every {self.period} steps " if self.period > 1 else ""
        return (
            f"adjust %{self.scale} {every}by {self.watched} elements: halve if more than "
            f"{self.share} of them are large, else double, "
            f"clear ({listed(self.within)})  on ipu{self.ipu}"
        )
