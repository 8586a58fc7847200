"""Bind a program to a plain call: a list of tensors in, a tuple out, nothing kept between calls."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ipu_dynamo.program import Program, Send
from ipu_dynamo.program.schedule.registers import number_slots
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.bound_calls import Step, picker, prepare_steps, run_steps
from ipu_dynamo.runtime.execute.error_attribution import explain

Boxed = Callable[[list[Any]], tuple[Any, ...]]


def bind(
    program: Program,
    engine: Engine,
    arguments: Sequence[str],
    constants: Sequence[Tensor],
    results: Sequence[str | float | None],
) -> Boxed:
    """Make `program` callable.

    Args:
        program: one micro-batch per call, no update.
        arguments: names of the program's variables and input streams, in calling order; those of
            `constants` come last.
        constants: tensors that the caller does not pass.
        results: for each position of the returned tuple the name of an argument or of an output
            stream; numbers and None are returned as they are.

    Returns:
        A function on the list of arguments, which it empties. It may run in several threads.
    """
    slots = number_slots(program, arguments)
    sent = {i.stream: slots[i.value] for i in sections(program).loop if isinstance(i, Send)}
    plain = [value for value in results if not isinstance(value, str)]
    count = max(slots.values(), default=-1) + 1
    after = iter(range(count, count + len(plain)))
    places = [
        next(after) if not isinstance(name, str) else sent[name] if name in sent else slots[name]
        for name in results
    ]
    steps = prepare_steps(program, engine, slots, kept={*places})
    if len(steps) == 1:
        return _one_step(steps[0], len(arguments), constants, places, count, plain)
    blank = [None] * (count - len(arguments))
    tail = [*constants, *blank, *plain]
    returned = picker(places)

    def run(given: list[Any]) -> tuple[Any, ...]:
        values = given + tail
        given.clear()
        run_steps(steps, values, 0)
        return returned(values)

    return run


def _one_step(
    step: Step,
    arguments: int,
    constants: Sequence[Tensor],
    places: Sequence[int],
    slots: int,
    plain: Sequence[float | None],
) -> Boxed:
    """One call, without a list of values in between: arguments come first, then results."""
    position = {slot: arguments + i for i, slot in enumerate(step.results) if slot is not None}
    position |= {slots + i: arguments + len(step.results) + i for i in range(len(plain))}
    returned = picker([position.get(place, place) for place in places])
    stage, take, tail = step.stage, step.arguments, list(constants)

    def run(given: list[Any]) -> tuple[Any, ...]:
        values = given + tail
        given.clear()
        try:
            results = stage(list(take(values)))
        except Exception as error:
            raise explain(error, step.call, step.function, take(values), 0) from error
        return returned([*values, *results, *plain])

    return run
