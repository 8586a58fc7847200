"""Trace one step of an optimiser into a graph, with the condition that it holds by.

A trace could lose a decision or fix a value. It is refused in four cases, checked in this order:
Python asks for the value of a tensor, a second trace differs, random states have moved, or the
graph holds a tensor from outside. A number that is read as a value becomes a condition.
"""

import os
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.update_symbols import (
    DATA_DEPENDENT,
    StandIns,
    Symbol,
    free_symbols,
    inside,
    record,
    recording,
    symbol_of,
)
from ipu_dynamo.capture.private.whole_numbers import SizesOfFunctions, SizesOfOperators
from ipu_dynamo.capture.random_states import random_states
from ipu_dynamo.capture.update.world import Leaf, World
from ipu_dynamo.errors import CompileError, IpuError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.locks import compile_lock

HOST = 'compile_training(..., update="host") runs its step in Python, after the program'


class UntraceableUpdate(CompileError):
    """An optimiser's step does something that no program can keep."""

    id = "update"


@dataclass(frozen=True)
class Result:
    """A value after a step.

    Args:
        path: of the leaf; or `parameter N`.
        in_graph: whether the graph returns it. Else it is `constant`.
    """

    path: str
    in_graph: bool
    constant: Any = None

    def __str__(self) -> str:
        return f"{self.path} {'traced' if self.in_graph else repr(self.constant)}"


@dataclass
class RecordedStep:
    """One step as a graph of operators on tensors and on Python's numbers.

    Args:
        graph: its placeholders are parameters, gradients, and the leaves `taken`, in this order.
            It returns those of `results` that are in the graph.
        world: that it was traced in.
        stand_ins: has made the stand-ins.
        values: the stand-ins of the placeholders.
        taken: leaves that are inputs: tensors and numbers.
        results: of parameters, in order, and of the leaves afterwards.
        conditions: expressions over the symbols of `symbols`, each with the user's line.
        symbols: places of the placeholders that expressions speak of, by symbol; below 0 those of
            the numbers that were read of tensors, counted from -1 down.
    """

    graph: fx.GraphModule
    world: World
    stand_ins: StandIns
    values: list[Any]
    taken: tuple[Leaf, ...]
    results: tuple[Result, ...]
    conditions: tuple[tuple[Any, str], ...]
    symbols: Mapping[str, int]

    @property
    def text(self) -> list[str]:
        """The graph, its tensors and the results, in lines."""
        lines = [str(node.format_node()) for node in self.graph.graph.nodes]
        tensors = _attributes(self.graph)
        constants = [f"{name} {value.tolist()}" for name, value in tensors.items()]
        return [*lines, *constants, *map(str, self.results)]

    @property
    def kept_conditions(self) -> list[tuple[Any, str]]:
        """The conditions of which every symbol is known."""
        return [
            (expression, line)
            for expression, line in self.conditions
            if free_symbols(expression) and free_symbols(expression) <= self.symbols.keys()
        ]


def trace_step(world: World, number_operators: Collection[str]) -> RecordedStep:
    """Trace a step from `world`, twice, to find parts that differ from time to time.

    Args:
        number_operators: names of the operators whose number may change from step to step.

    Raises:
        UntraceableUpdate: with the line of the optimiser.
    """
    if not world.parameters:
        raise UntraceableUpdate("the optimizer has no parameter to train", hint="give it some")
    with compile_lock(), _random_states_stay(world):
        first, second = (_record(world, number_operators) for _ in range(2))
        if (one := first.text) != (other := second.text):
            line = next((a for a, b in zip(one, other, strict=False) if a != b), "its length")
            raise UntraceableUpdate(
                f"{_name(world)} does not do the same twice: {line}",
                hint=f"keep what changes from step to step in its groups or its state, or: {HOST}",
            )
        _refuse_captured(first, second)
        return first


def _attributes(graph: fx.GraphModule) -> dict[str, Tensor]:
    """The tensors that a graph holds itself."""
    names = [str(node.target) for node in graph.graph.find_nodes(op="get_attr")]
    held = {name: getattr(graph, name) for name in names}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def _refuse_captured(first: RecordedStep, second: RecordedStep) -> None:
    """Refuse a tensor that is the same object in both traces: it comes from outside, and later
    values would be lost. A tensor that a step makes is a new object in each trace."""
    other = _attributes(second.graph)
    for name, tensor in _attributes(first.graph).items():
        if other.get(name) is tensor:
            raise UntraceableUpdate(
                f"{_name(first.world)} reads a tensor of shape {list(tensor.shape)} that is in no "
                "group, no state and no attribute",
                hint=f"keep it in optimizer.state or as an attribute, or: {HOST}",
            )


def _record(world: World, number_operators: Collection[str]) -> RecordedStep:
    stand_ins = StandIns()
    taken = [leaf for leaf in world.leaves if leaf.is_tensor or leaf.is_number]
    results: list[Result] = []
    parameters = [stand_ins.tensor(p, known=False) for p in world.parameters]
    gradients = [stand_ins.tensor(p, known=False) for p in world.parameters]
    stands = [
        stand_ins.number(leaf.value, f"in_{i}")
        if leaf.is_number
        else stand_ins.tensor(leaf.value, known=world.is_known(leaf))
        for i, leaf in enumerate(taken)
    ]
    count = len(parameters)
    settings = {  # a parameter's count of steps is no setting, and no size
        str(symbol_of(given))
        for leaf, given in zip(taken, stands, strict=True)
        if leaf.parameter is None and type(leaf.value) is int
    }

    def run(*values: Any) -> list[Any]:
        own, grads, rest = values[:count], values[count : 2 * count], iter(values[2 * count :])
        leaves = [
            own[leaf.refers]
            if leaf.refers is not None
            else next(rest)
            if leaf.is_tensor or leaf.is_number
            else leaf.value
            for leaf in world.leaves
        ]
        sizes = SizesOfFunctions(settings), SizesOfOperators(settings, number_operators)
        with inside(), sizes[0], sizes[1]:
            shadow = world.shadow(leaves, own, grads)
            type(world.optimizer).step(shadow)
        after = world.of_shadow(shadow, own)
        traced = [isinstance(value, (Tensor, *Symbol)) for _, value in after]
        results[:] = [Result(f"parameter {i}", True) for i in range(count)]
        results.extend(
            Result(path, True) if in_graph else Result(path, False, value)
            for (path, value), in_graph in zip(after, traced, strict=True)
        )
        return [*own, *(v for (_, v), in_graph in zip(after, traced, strict=True) if in_graph)]

    values = [*parameters, *gradients, *stands]
    with recording(stand_ins):
        try:
            raw = record(run, values)
        except Exception as error:
            raise explained(error, world) from error
    conditions = tuple(stand_ins.conditions())
    found = _symbols(raw)
    return RecordedStep(
        raw, world, stand_ins, values, tuple(taken), tuple(results), conditions, found
    )


def _symbols(raw: fx.GraphModule) -> dict[str, int]:
    """The placeholder of each symbol, by number. The n-th number that was read of a tensor has the
    number -1 - n."""
    found: dict[str, int] = {}
    for place, node in enumerate(raw.graph.find_nodes(op="placeholder")):
        if isinstance(node.meta.get("val"), Symbol):
            found[str(symbol_of(node.meta["val"]))] = place
    for number, node in enumerate(
        raw.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    ):
        if isinstance(node.meta.get("val"), Symbol):
            found[str(symbol_of(node.meta["val"]))] = -1 - number
    return found


def explained(error: Exception, world: World) -> IpuError:
    """The error with the line of the optimiser that caused it; one of this package is clear."""
    if isinstance(error, IpuError):
        return error
    where = _line_within(error)
    if isinstance(error, DATA_DEPENDENT):
        problem = f"{_name(world)} decides in Python by the values of gradients or weights"
    else:
        problem = f"{_name(world)} cannot be traced: {type(error).__name__}: {_first_line(error)}"
    return UntraceableUpdate(problem, where=where, hint=HOST)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no message")


def _line_within(error: Exception) -> str:
    """The innermost line outside PyTorch and this package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _LIBRARIES)]
    own = own or [f for f in frames if f"optim{os.sep}" in f.filename]
    if not own:
        return ""
    last = own[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}: {last.line}"


_LIBRARIES = (os.path.dirname(torch.__file__), f"{os.sep}ipu_dynamo{os.sep}", "<")


@contextmanager
def _random_states_stay(world: World) -> Iterator[None]:
    """Refuse a step that draws random numbers in Python: they would be drawn once."""
    before = random_states()
    yield
    if random_states() != before:
        raise UntraceableUpdate(
            f"{_name(world)} draws random numbers in Python",
            hint=f"draw them with torch, or: {HOST}",
        )


def _name(world: World) -> str:
    kind = type(world.optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"
