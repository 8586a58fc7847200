"""Make callables of the functions of traced updates, each once."""

from typing import Protocol

import torch

from ipu_dynamo.program import Function
from ipu_dynamo.program.recipe import Recipe
from ipu_dynamo.runtime.engines.engines import EagerEngine, Engine
from ipu_dynamo.runtime.engines.stage_key import keyed
from ipu_dynamo.runtime.update.traced_update import Run


class UpdateRecipe(Protocol):
    """Says how the function of a traced update becomes a callable.

    A weight that is kept is returned, and not written; what runs once is not compiled; what does
    not write returns what the function gives.
    """

    def __call__(
        self,
        function: Function,
        threads: int | None,
        /,
        *,
        keep_weight: bool,
        once: bool,
        writes: bool,
    ) -> Recipe: ...


class UpdateRuns:
    """The callables of a program.

    Args:
        engine: makes them, but for those that run operator by operator.
        threads: intra-op threads.
        recipe: says how; None: the program has no traced updates.
    """

    def __init__(self, engine: Engine, threads: int | None, recipe: UpdateRecipe | None) -> None:
        self._engine, self._threads, self._recipe = engine, threads, recipe
        self._runs: dict[tuple[str, torch.device | None, bool], Run] = {}

    def updating(
        self, function: Function, device: torch.device, keep_weight: bool, once: bool
    ) -> Run:
        """One that writes what a function gives."""
        key = function.key, device, keep_weight
        if key not in self._runs:
            self._runs[key] = self._compile(function, keep_weight=keep_weight, once=once)
        return self._runs[key]

    def computing(self, function: Function) -> Run:
        """One that returns what a function gives. What is computed of numbers alone runs operator
        by operator: it takes less time than to compile it would."""
        key = function.key, None, False
        if key not in self._runs:
            numbers = all(type_ is None or not type_.shape for type_ in function.inputs)
            self._runs[key] = self._compile(function, keep_weight=False, once=numbers, writes=False)
        return self._runs[key]

    def _compile(
        self, function: Function, *, keep_weight: bool, once: bool, writes: bool = True
    ) -> Run:
        assert self._recipe is not None, "the program has traced updates"
        recipe = self._recipe(
            function, self._threads, keep_weight=keep_weight, once=once, writes=writes
        )
        engine = EagerEngine() if once else self._engine
        (run,) = engine.compile([keyed(recipe)])
        return run
