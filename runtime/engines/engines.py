"""Turn recipes into callables: compiled by Inductor, or run operator by operator."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.autograd.graph import increment_version

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.native import cpp_compiler_names
from ipu_dynamo.program.recipe import Recipe
from ipu_dynamo.progress import begin
from ipu_dynamo.runtime.engines.check.checks import Checks
from ipu_dynamo.runtime.engines.eager_code import eager_code
from ipu_dynamo.runtime.engines.inductor_noise import mute
from ipu_dynamo.runtime.engines.layouts import laid_out, layouts_of, views_of
from ipu_dynamo.runtime.engines.packed_weights import packing
from ipu_dynamo.runtime.engines.parts import in_parts
from ipu_dynamo.runtime.engines.stage import Stage

if TYPE_CHECKING:
    from ipu_dynamo.runtime.engines.compiled_stages import MachineCodes

log = logging.getLogger(__name__)
ENGINE = "IPU_DYNAMO_ENGINE"  # environment variable: what `auto` stands for
_ENGINES = ("auto", "inductor", "eager")


class Engine(Protocol):
    """Makes callables of recipes; counts how many it made."""

    name: str
    compiled: int
    checks: Checks

    def compile(self, recipes: Sequence[Recipe]) -> list[Stage]:
        """Callables on a list of tensors, which they may change; grad mode has to be off.

        What is asked for together is compiled together, which takes less time.
        """


class EagerEngine:
    """Runs a function's operators one by one: the reference for every other engine."""

    name = "eager"

    def __init__(self) -> None:
        self.compiled = 0
        self.checks = Checks("off")

    def compile(self, recipes: Sequence[Recipe]) -> list[Stage]:
        self.compiled += len(recipes)
        return [_run_eagerly(recipe) for recipe in _told(recipes)]


class InductorEngine:
    """Compiles a function to machine code with PyTorch's Inductor.

    Args:
        check: when compiled functions are compared with their operators: see `Checks`.
    """

    name = "inductor"

    def __init__(self, check: str = "auto") -> None:
        mute()
        self.compiled = 0
        self.checks = Checks(check)

    def compile(self, recipes: Sequence[Recipe]) -> list[Stage]:
        self.compiled += len(recipes)
        known = {
            place: stage
            for place, recipe in enumerate(recipes)
            if _has_machine_code(recipe) and (stage := self.checks.failed_before(recipe))
        }
        left = [recipe for place, recipe in enumerate(recipes) if place not in known]
        made = iter(
            self._checked(recipe, packing(run, recipe.packed) if recipe.packed else run)
            for run, recipe in zip(_compiled_together(left), left, strict=True)
        )
        return [known[place] if place in known else next(made) for place in range(len(recipes))]

    def _checked(self, recipe: Recipe, run: Stage) -> Stage:
        return self.checks.checked(recipe, run) if _has_machine_code(recipe) else run


def _compiled_together(recipes: Sequence[Recipe]) -> list[Stage]:
    if not any(map(_has_machine_code, recipes)):
        return [_run_eagerly(recipe) for recipe in _told(recipes)]
    from ipu_dynamo.runtime.engines.compiled_stages import (
        machine_codes,  # Inductor: a second to import
    )

    with machine_codes() as codes:
        stages = [_compiled(recipe, codes) for recipe in _told(recipes)]
    if codes.some_failed:
        return [_compiled(recipe, codes) for recipe in recipes]
    return stages


def _told(recipes: Sequence[Recipe]) -> Iterator[Recipe]:
    """The recipes, each of which is begun with."""
    for number, recipe in enumerate(recipes, 1):
        begin("functions", number, len(recipes))
        yield recipe


def _has_machine_code(recipe: Recipe) -> bool:
    if recipe.parts is not None:
        return any(_has_machine_code(part.recipe) for part in recipe.parts.parts)
    return recipe.engine == "inductor" or any(map(_has_machine_code, recipe.bodies))


def _run_eagerly(recipe: Recipe) -> Stage:
    return _eager(recipe, _run_eagerly)


def _eager(recipe: Recipe, compile_: Callable[[Recipe], Stage]) -> Stage:
    """What runs a recipe operator by operator, and bodies as their recipes say."""
    bodies = {body.function.name: compile_(body) for body in recipe.bodies}
    return eager_code(recipe.lowered.graph.graph, bodies)


def _compiled(recipe: Recipe, codes: "MachineCodes") -> Stage:
    """What runs a recipe on all its inputs."""
    compile_ = partial(_compiled, codes=codes)
    if recipe.parts is not None:
        inputs = len(recipe.lowered.inputs)
        return in_parts(recipe.parts, inputs, compile_)
    if recipe.engine == "eager" or codes.failed(recipe):
        return _eager(recipe, compile_)
    code = codes.code_of(recipe)
    run = _counting(code.run, recipe.written) if code.unwrapped and recipe.written else code.run
    graph = recipe.lowered.graph
    return laid_out(run, code.layouts, layouts_of(graph), views_of(graph))


def _counting(run: Stage, written: tuple[int, ...]) -> Stage:
    """`run`, whose changes in place their tensors count, as after any operator of PyTorch."""

    def stage(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        tensors = [arguments[place] for place in written]
        results = run(arguments)
        increment_version(tensors)
        return results

    return stage


def make_engine(name: str, check: str = "auto") -> Engine:
    """The engine called `name`, whose compiled functions are checked as `check` says.

    `auto`: the one that the environment variable IPU_DYNAMO_ENGINE names (`auto`, `inductor` or
    `eager`), else Inductor where a C++ compiler is found, else eager.
    """
    if name == "auto":
        name = os.environ.get(ENGINE) or "auto"
        if name not in _ENGINES:
            raise IpuError(f"{ENGINE} is {name!r}: choose one of {', '.join(_ENGINES)}")
    if name == "eager":
        return EagerEngine()
    if _compiler() is not None:
        return InductorEngine(check)
    if name == "inductor":
        raise IpuError(
            f"the inductor engine needs a C++ compiler ({_tried()}): install g++ or clang++, or "
            "choose engine='eager'"
        )
    return EagerEngine()


@cache
def _compiler() -> str | None:
    """The C++ compiler that Inductor will find; one line of log when there is none."""
    found = next((path for name in cpp_compiler_names() if (path := shutil.which(name))), None)
    if found is None:
        log.warning(
            "no C++ compiler found (%s): stages run on the eager engine, operator by operator",
            _tried(),
        )
    return found


def _tried() -> str:
    names = ", ".join(map(repr, cpp_compiler_names()))
    return f"tried {names}, each the name of a program without options"
