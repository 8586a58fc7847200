"""Run a function in parts: its loops, and what is compiled between them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ipu_dynamo.program.recipe import Parts, Recipe
from ipu_dynamo.runtime.engines.stage import Stage


def in_parts(parts: Parts, inputs: int, compile_: Callable[[Recipe], Stage]) -> Stage:
    """A callable on so many inputs; `compile_` makes those of the parts."""
    steps = [(compile_(p.recipe), p.arguments, p.results, p.dead) for p in parts.parts]
    made_by_all = [number for part in parts.parts for number in part.results]
    further = [None] * (1 + max(made_by_all, default=inputs - 1) - inputs)
    returned = parts.results

    def stage(arguments: list[Tensor]) -> list[Tensor | None]:
        values: list[Any] = [*arguments, *further]
        arguments.clear()
        for run, taken, made, dead in steps:
            for number, value in zip(made, run([values[n] for n in taken]), strict=True):
                values[number] = value
            for number in dead:
                values[number] = None
        return [None if number is None else values[number] for number in returned]

    return stage
