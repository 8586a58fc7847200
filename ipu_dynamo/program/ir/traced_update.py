"""Describe an update that was traced from Python: functions, and their arguments."""

from collections.abc import Mapping
from dataclasses import dataclass

from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that the step itself changes, and that depends on no gradient.

    Args:
        name: of its variable.
        type: f64[], f32[], i64[], ...
        initial: its first value.
    """

    name: str
    type: TensorType
    initial: float | int


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """The call that computes, of one parameter, the values that updates of others need.

    Args:
        function: takes weight, gradient, states and `arguments`.
        arguments, results: names of values.
    """

    function: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """An exchange between the parameters of a step, before their updates.

    Args:
        parts: by parameter; those of which nothing is needed are left out.
        function: takes `arguments`; returns `results`, and the new values of `written`.
        written: states that belong to no parameter.
    """

    parts: Mapping[str, ParameterPart]
    function: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    written: tuple[str, ...]


@dataclass(frozen=True)
class TracedStep:
    """One step of an optimiser for all its parameters.

    Args:
        factors: takes hyperparameters and counters; gives `results`, the counters' next values,
            and whether the trace holds for these numbers.
        hyperparameters: by group and name, in the function's order.
        pieces: the functions that update a parameter, and those of `rounds`, by name.
        functions: by parameter, the name of its function.
        states: by parameter, name and type of each of its states.
        arguments: by parameter, which of `results`, and of those of rounds, its function takes
            after weight, gradient and states.
        elementwise: pieces that compute element by element, so that a shard can be updated alone.
        once: it is for one step only, the first.
        rounds: the exchanges between parameters, in order; empty if each is updated by itself.
        shared: name and type of each state that belongs to no parameter.
    """

    factors: Function
    hyperparameters: tuple[tuple[int, str], ...]
    counters: tuple[Counter, ...]
    results: tuple[str, ...]
    pieces: Mapping[str, Function]
    functions: Mapping[str, str]
    states: Mapping[str, tuple[tuple[str, TensorType], ...]]
    arguments: Mapping[str, tuple[str, ...]]
    elementwise: frozenset[str]
    once: bool = False
    rounds: tuple[Round, ...] = ()
    shared: tuple[tuple[str, TensorType], ...] = ()
