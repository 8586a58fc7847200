"""Describe an update that was traced from Python: functions, and what they are called with."""

from collections.abc import Mapping
from dataclasses import dataclass

from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that the step itself changes, and that hangs on no gradient.

    Args:
        name: of its variable.
        type: f64[], f32[], i64[], ...
        initial: its first value.
    """

    name: str
    type: TensorType
    initial: float | int


@dataclass(frozen=True)
class TracedStep:
    """One step of an optimiser for all its parameters.

    Args:
        factors: takes hyperparameters and counters; gives `results`, the counters' next values,
            and whether the trace holds for these numbers.
        hyperparameters: by group and name, in the function's order.
        pieces: the functions that update a parameter, by name.
        functions: by parameter, the name of its function.
        states: by parameter, name and type of what is kept for it.
        arguments: by parameter, which of `results` its function takes behind weight, gradient and
            states.
        elementwise: pieces that compute element by element, so that a shard can be updated alone.
        once: it is for one step only, the first.
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
