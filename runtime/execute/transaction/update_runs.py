"""Make callables of the functions of traced updates, each once, and compile them together."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ipu_dynamo.program import Function
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.runtime.engines.engines import EagerEngine, Engine
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.engines.stage_key import keyed
from ipu_dynamo.runtime.update.traced_update import Run


class UpdateRecipe(Protocol):
    """Says how the function of a traced update becomes a callable.

    With `keep_weight` the weight is returned, and not written. With `once` the function is not
    compiled. Without `writes` the callable returns the function's results. With a number of
    elements it is for parameters in a row, and None if those cannot be updated together.
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
        elements: int | None,
    ) -> FunctionRecipe | None: ...


class _Later:
    """A callable that is compiled with others, after all are known."""

    __slots__ = ("_stage",)

    def __init__(self) -> None:
        self._stage: Stage | None = None

    def is_made(self, stage: Stage) -> None:
        """From now on it calls that."""
        self._stage = stage

    def __call__(self, arguments: list[Tensor]) -> Sequence[Tensor | None]:
        assert self._stage is not None, "the functions of updates are not compiled yet"
        return self._stage(arguments)


# The function, the device if it writes, and whether the weight is kept.
_Key = tuple[str, torch.device | None, bool]


class UpdateRuns:
    """The callables of a program. They can be called once `compile` has been.

    Args:
        engine: makes them, but for those that run operator by operator.
        threads: intra-op threads.
        recipe: says how; None: the program has no traced updates.
    """

    def __init__(self, engine: Engine, threads: int | None, recipe: UpdateRecipe | None) -> None:
        self._engine, self._threads, self._recipe = engine, threads, recipe
        self._runs: dict[_Key, Run] = {}
        self._waiting: dict[_Key, tuple[FunctionRecipe, _Later]] = {}  # for `compile`

    def compile(self, recipes: Sequence[FunctionRecipe] = ()) -> list[Stage]:
        """Compile the functions requested since the last time, and others in the same run.

        Returns:
            The callables of `recipes`.
        """
        own = [keyed(recipe) for recipe, _ in self._waiting.values()]
        stages = self._engine.compile([*recipes, *own]) if recipes or own else []
        for (key, (_, run)), stage in zip(
            self._waiting.items(), stages[len(recipes) :], strict=True
        ):
            run.is_made(stage)
            self._runs[key] = run
        self._waiting.clear()
        return stages[: len(recipes)]

    def forget_waiting(self) -> None:
        """Forget the functions that an error or interrupt has left without being compiled."""
        self._waiting.clear()

    def updating(
        self, function: Function, device: torch.device, keep_weight: bool, once: bool
    ) -> Run:
        """Return a callable that writes a function's results."""
        key = function.key, device, keep_weight
        return self._known(key) or self._made(key, function, keep_weight=keep_weight, once=once)

    def joined(self, function: Function, device: torch.device, elements: int) -> Run | None:
        """Return a callable that writes a function's results, for so many elements in a row.

        None if the parameters cannot be updated together.
        """
        assert self._recipe is not None, "the program has traced updates"
        recipe = self._recipe(
            function, self._threads, keep_weight=False, once=False, writes=True, elements=elements
        )
        if recipe is None:
            return None
        key = recipe.function.key, device, False
        return self._known(key) or self._later(key, recipe)

    def computing(self, function: Function) -> Run:
        """Return a callable that returns a function's results.

        A function of numbers alone runs operator by operator: compiling it would take longer.
        """
        key = function.key, None, False
        numbers = all(type_ is None or not type_.shape for type_ in function.inputs)
        return self._known(key) or self._made(
            key, function, keep_weight=False, once=numbers, writes=False
        )

    def _known(self, key: _Key) -> Run | None:
        waiting = self._waiting.get(key)
        return self._runs.get(key) if waiting is None else waiting[1]

    def _made(
        self, key: _Key, function: Function, *, keep_weight: bool, once: bool, writes: bool = True
    ) -> Run:
        assert self._recipe is not None, "the program has traced updates"
        recipe = self._recipe(
            function,
            self._threads,
            keep_weight=keep_weight,
            once=once,
            writes=writes,
            elements=None,
        )
        assert recipe is not None
        if not once:
            return self._later(key, recipe)
        (self._runs[key],) = EagerEngine().compile([keyed(recipe)])
        return self._runs[key]

    def _later(self, key: _Key, recipe: FunctionRecipe) -> Run:
        run = _Later()
        self._waiting[key] = recipe, run
        return run
