"""Bind a program to a plain call: a list of tensors in, a tuple out, nothing kept between calls."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ipu_dynamo.program import Program, Send
from ipu_dynamo.runtime.blame import explain
from ipu_dynamo.runtime.engines import Engine
from ipu_dynamo.runtime.steps import Step, number_slots, picker, prepare_steps, run_steps, sections

Boxed = Callable[[list[Any]], tuple[Any, ...]]


def bind(
    program: Program,
    engine: Engine,
    arguments: Sequence[str],
    constants: Sequence[Tensor],
    results: Sequence[str | None],
) -> Boxed:
    """Make `program` callable.

    Args:
        program: one micro-batch per call, no update.
        arguments: names of the program's variables and input streams, in calling order; those of
            `constants` come last.
        constants: tensors that the caller does not pass.
        results: for each position of the returned tuple the name of an argument or of an output
            stream, or None.

    Returns:
        A function on the list of arguments, which it empties. It may run in several threads.
    """
    slots = number_slots(program, arguments)
    sent = {i.stream: slots[i.value] for i in sections(program).loop if isinstance(i, Send)}
    nothing = max(slots.values(), default=-1) + 1
    places = [
        nothing if name is None else sent[name] if name in sent else slots[name]
        for name in results
    ]
    steps = prepare_steps(program, engine, slots, kept={*places})
    if len(steps) == 1:
        return _one_step(steps[0], len(arguments), constants, places, nothing)
    tail = [*constants, *([None] * (nothing + 1 - len(arguments)))]
    returned = picker(places)

    def run(given: list[Any]) -> tuple[Any, ...]:
        values = given + tail
        given.clear()
        run_steps(steps, values, 0)
        return returned(values)

    return run


def _one_step(
    step: Step, count: int, constants: Sequence[Tensor], places: Sequence[int], nothing: int
) -> Boxed:
    """One call, without a list of values in between: places count arguments, then results."""
    position = {slot: count + i for i, slot in enumerate(step.results) if slot is not None}
    position[nothing] = count + len(step.results)
    returned = picker([position.get(place, place) for place in places])
    stage, arguments, tail = step.stage, step.arguments, list(constants)

    def run(given: list[Any]) -> tuple[Any, ...]:
        values = given + tail
        given.clear()
        try:
            results = stage(list(arguments(values)))
        except Exception as error:
            raise explain(error, step.call, step.function, arguments(values), 0) from error
        return returned([*values, *results, None])

    return run
