"""Turn recipes into callables: compiled by Inductor, or run operator by operator."""

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor
from torch.autograd.graph import increment_version

from ipu_dynamo.errors import IpuError, OptionError
from ipu_dynamo.ops.private.native import cpp_compiler_names, find_compiler, onednn_pack
from ipu_dynamo.profiling import recording
from ipu_dynamo.program.recipe import CutFunction, FunctionRecipe, PrepackedWeight
from ipu_dynamo.progress import begin
from ipu_dynamo.runtime.engines.check.checks import Checks, choose_check
from ipu_dynamo.runtime.engines.eager_code import eager_code
from ipu_dynamo.runtime.engines.layouts import laid_out, layouts_of, views_of
from ipu_dynamo.runtime.engines.pending_code import PendingCode, begin_compiling
from ipu_dynamo.runtime.engines.stage import Stage

if TYPE_CHECKING:
    from ipu_dynamo.runtime.engines.compiled_stages import Allocations, MachineCodes

log = logging.getLogger(__name__)
ENGINE = "IPU_DYNAMO_ENGINE"  # environment variable: the choice for `auto`
_ENGINES = ("auto", "inductor", "eager")
_NOISE = "standalone_compile artifact generation failed"  # how a warning of Inductor begins


class Engine(Protocol):
    """Makes callables of recipes; counts how many it made."""

    name: str
    compiled: int
    checks: Checks

    def compile(self, recipes: Sequence[FunctionRecipe]) -> list[Stage]:
        """Callables on a list of tensors, which they may change; grad mode has to be off.

        The recipes of one call are compiled together, which takes less time.
        """

    def begin(self, recipes: Sequence[FunctionRecipe]) -> PendingCode | None:
        """Let another process compile what `compile` would; None: it would compile nothing.

        Raises:
            OnlyHere: another process cannot compile it.
        """


class EagerEngine:
    """Runs a function's operators one by one: the reference for every other engine."""

    name = "eager"

    def __init__(self) -> None:
        self.compiled = 0
        self.checks = Checks("off")

    def compile(self, recipes: Sequence[FunctionRecipe]) -> list[Stage]:
        self.compiled += len(recipes)
        return _each(recipes, eager_stage)

    def begin(self, recipes: Sequence[FunctionRecipe]) -> PendingCode | None:
        return None


class InductorEngine:
    """Compiles a function to machine code with PyTorch's Inductor.

    Args:
        check: when compiled functions are compared with their operators: see `Checks`.
    """

    name = "inductor"

    def __init__(self, check: str = "auto") -> None:
        mute_inductor()
        self.compiled = 0
        self.checks = Checks(check)

    def compile(self, recipes: Sequence[FunctionRecipe]) -> list[Stage]:
        self.compiled += len(recipes)
        known = {
            place: stage
            for place, recipe in enumerate(recipes)
            if _has_machine_code(recipe) and (stage := self.checks.failed_before(recipe))
        }
        left = [recipe for place, recipe in enumerate(recipes) if place not in known]
        made = iter(
            self._checked(recipe, _prepacked(run, recipe.packed) if recipe.packed else run)
            for run, recipe in zip(_compiled_together(left), left, strict=True)
        )
        return [known[place] if place in known else next(made) for place in range(len(recipes))]

    def begin(self, recipes: Sequence[FunctionRecipe]) -> PendingCode | None:
        return begin_compiling(recipes)

    def _checked(self, recipe: FunctionRecipe, run: Stage) -> Stage:
        return self.checks.checked(recipe, run) if _has_machine_code(recipe) else run


def _compiled_together(recipes: Sequence[FunctionRecipe]) -> list[Stage]:
    if not any(map(_has_machine_code, recipes)):
        return _each(recipes, eager_stage)
    from ipu_dynamo.runtime.engines.compiled_stages import (
        machine_codes,  # Inductor: a second to import
    )

    with machine_codes(leaf for recipe in recipes for leaf in recipe.compiled_parts) as codes:
        stages = _each(recipes, partial(_compiled, codes=codes))
    if codes.some_failed:
        return [_compiled(recipe, codes) for recipe in recipes]
    return stages


def _each(
    recipes: Sequence[FunctionRecipe], compile_: Callable[[FunctionRecipe], Stage]
) -> list[Stage]:
    """Callables of the recipes; report the beginning of each, and record it."""
    stages = []
    for number, recipe in enumerate(recipes, 1):
        begin("functions", number, len(recipes))
        name, operators = recipe.function.name, len(recipe.function.graph.graph.nodes)
        with recording.span(f"@{name}", "function", engine=recipe.engine, operators=operators):
            stages.append(compile_(recipe))
    return stages


def _has_machine_code(recipe: FunctionRecipe) -> bool:
    return bool(recipe.compiled_parts)


def eager_stage(recipe: FunctionRecipe) -> Stage:
    """A callable that runs a recipe operator by operator, with all of its bodies."""
    return _eager(recipe, eager_stage)


def _eager(recipe: FunctionRecipe, compile_: Callable[[FunctionRecipe], Stage]) -> Stage:
    """Return a callable that runs operator by operator, but bodies as their recipes say."""
    bodies = {body.function.name: compile_(body) for body in recipe.bodies}
    return eager_code(recipe.lowered.graph.graph, bodies)


def allocating_stage(recipe: FunctionRecipe) -> Stage | None:
    """What the engine's callable of a recipe allocates and frees, for tensors without contents.

    None: its code is not known in this process.
    """
    from ipu_dynamo.runtime.engines.compiled_stages import Allocations

    codes = Allocations()
    stage = _compiled(recipe, codes)
    return stage if codes.complete else None


def _compiled(recipe: FunctionRecipe, codes: "MachineCodes | Allocations") -> Stage:
    """Return a callable that runs a recipe on all its inputs."""
    compile_ = partial(_compiled, codes=codes)
    if recipe.parts is not None:
        inputs = len(recipe.lowered.inputs)
        return _in_parts(recipe.parts, inputs, compile_)
    if recipe.engine == "eager" or codes.failed(recipe):
        return _eager(recipe, compile_)
    code = codes.code_of(recipe)
    if code is None:
        return _eager(recipe, compile_)
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


def _in_parts(
    parts: CutFunction, inputs: int, compile_: Callable[[FunctionRecipe], Stage]
) -> Stage:
    """Run a function in parts: its loops, and the functions between them, on so many inputs."""
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


def _prepacked(run: Stage, packed: Sequence[PrepackedWeight]) -> Stage:
    """Pack weights for `run`, which takes them in a library's own order after its inputs.

    Each weight of a call is packed once, and again after a write to it.
    """
    packings: dict[tuple[int, int], tuple[Tensor, int, Tensor]] = {}

    def stage(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        further = []
        for one in packed:
            weight = arguments[one.source]
            key, version = (id(weight), one.rows), weight._version
            entry = packings.get(key)
            if entry is None or entry[1] != version:
                entry = weight, version, onednn_pack(weight.contiguous(), one.rows)
                packings[key] = entry  # it keeps the weight, too, so that no other gets its id
            further.append(entry[2])
        return run([*arguments, *further])

    return stage


def mute_inductor() -> None:
    """Drop one warning of Inductor from now on: users can do nothing about it.

    `standalone_compile` warns if a stage left nothing for Inductor's own cache, for instance with
    an operator that Inductor does not cache. The stage is compiled and runs. Only a later process
    has to compile it again. With one message for each stage the warning hides those that matter.
    """
    logging.getLogger("torch._inductor.standalone_compile").addFilter(_matters)


def _matters(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NOISE)


def make_engine(name: str, check: str = "auto") -> Engine:
    """The engine called `name`, whose compiled functions are checked as `check` says.

    `auto`: the engine in the environment variable IPU_DYNAMO_ENGINE (`auto`, `inductor` or
    `eager`), else Inductor if there is a C++ compiler, else eager.
    """
    chosen, _ = choose_engine(name)
    check = choose_check(check)  # a wrong value is an error also where nothing is compiled
    return InductorEngine(check) if chosen == "inductor" else EagerEngine()


def choose_engine(name: str) -> tuple[Literal["inductor", "eager"], str]:
    """The engine that `make_engine` makes, and the reason.

    Raises:
        IpuError: the environment names no engine, or there is no compiler for the one named.
    """
    reason = "it is named"
    if name == "auto":
        name = os.environ.get(ENGINE) or "auto"
        if name not in _ENGINES:
            raise OptionError(f"{ENGINE} is {name!r}: choose one of {', '.join(_ENGINES)}")
        reason = f"{ENGINE} names it"
    if name == "eager":
        return "eager", reason
    found = _compiler()
    if name == "auto":
        if found is None:
            return "eager", "no C++ compiler is found"
        return "inductor", f"{found} is a C++ compiler"
    if found is None:
        raise IpuError(
            f"the inductor engine needs a C++ compiler ({_tried()}): install g++ or clang++, or "
            "choose engine='eager'"
        )
    return "inductor", reason


@cache
def _compiler() -> str | None:
    """The C++ compiler that Inductor will find; one line of log when there is none."""
    found = find_compiler()
    if found is None:
        log.warning(
            "no C++ compiler found (%s): stages run on the eager engine, operator by operator",
            _tried(),
        )
    return found


def _tried() -> str:
    names = ", ".join(map(repr, cpp_compiler_names()))
    return f"tried {names}, each the name of a program without options"
