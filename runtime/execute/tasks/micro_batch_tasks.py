"""Bind a program's loop over micro-batches to the callables of its functions."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ipu_dynamo.profiling import recording
from ipu_dynamo.profiling.private.profiler import profiler_runs
from ipu_dynamo.program import HostProgram, Plain, Program
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import instructions_of_passes
from ipu_dynamo.program.share import OwnReplicas
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.engines.stage_key import keyed
from ipu_dynamo.runtime.execute.error_attribution import explain
from ipu_dynamo.runtime.execute.tasks.task_code import Binding, Failed, TaskWriter

# A stage pass of one micro-batch, given its registers, its number in the call, the values of every
# input stream, and the places of every output.
Task = Callable[[list[Any], int, Sequence[Sequence[Any]], Sequence[Any]], None]
# The same, and a function that makes a block of each of its instructions.
TimedTask = Callable[
    [
        list[Any],
        int,
        Sequence[Sequence[Any]],
        Sequence[Any],
        Callable[[Plain], AbstractContextManager[None]],
    ],
    None,
]
Stages = Mapping[str, tuple[FunctionRecipe, Stage]]
_ARGUMENTS = "r, k, received, sent"
_TIMED = f"{_ARGUMENTS}, timed"


def stages_of(
    host: HostProgram, compile_: Callable[[Sequence[FunctionRecipe]], Sequence[Stage]]
) -> Stages:
    """Recipe and callable of every function, which `compile_` makes."""
    recipes = {name: keyed(recipe) for name, recipe in host.recipes.items()}
    stages = compile_([*recipes.values()])
    return dict(zip(recipes, zip(recipes.values(), stages, strict=True), strict=True))


def failure_of(program: Program, replicas: OwnReplicas | None = None) -> Failed:
    """Return the error for a call that fails: it names operator, stage and source line.

    Its micro-batch is numbered in the program, whose replicas may be those of several ranks.

    Args:
        replicas: those that run here; None: all.
    """
    replicas = replicas or OwnReplicas.all(program.replicas)
    calls, count, first = program.calls, len(replicas.own), replicas.own.start
    functions = {function.name: function for function in program.functions}

    def failed(
        number: int, error: Exception, arguments: Sequence[Any] | None, micro_batch: int
    ) -> Exception:
        call = calls[number]
        step, replica = divmod(micro_batch, count)
        number_in_all = step * replicas.count + first + replica
        return explain(error, call, functions[call.function], arguments, number_in_all)

    return failed


def bind_passes(binding: Binding) -> list[Task]:
    """A function for every stage pass of a micro-batch."""
    return _functions(binding, _passes(binding), timed=False)


def bind_timed_passes(binding: Binding) -> list[TimedTask]:
    """The same functions, which time their instructions."""
    return _functions(binding, _passes(binding), timed=True)


def bind_instructions(binding: Binding, instructions: Sequence[Plain]) -> Task:
    """A function for instructions that run once for all micro-batches."""
    (task,) = _functions(binding, [instructions], timed=False)
    return task


def bind_timed_instructions(binding: Binding, instructions: Sequence[Plain]) -> TimedTask:
    """The same function, which times its instructions."""
    (task,) = _functions(binding, [instructions], timed=True)
    return task


def _passes(binding: Binding) -> list[list[Plain]]:
    return instructions_of_passes(sections(binding.program).loop)


def _functions(
    binding: Binding, passes: Sequence[Sequence[Plain]], *, timed: bool
) -> list[Callable[..., None]]:
    writer = TaskWriter(binding, passes, timed=timed)
    arguments = _TIMED if timed else _ARGUMENTS
    return [
        writer.function(f"pass{number}", arguments, lines)
        for number, lines in enumerate(writer.lines)
    ]


def bind_call(
    binding: Binding,
    further: Sequence[Any],
    results: Sequence[int],
    last_call: list[int],
    next_call: Callable[[], int],
    recorded: Callable[[list[Any]], tuple[Any, ...]] | None = None,
) -> Callable[[list[Any]], tuple[Any, ...]]:
    """One function for all of a micro-batch: of a list with the first registers, which it empties,
    to the values of `results`.

    Args:
        further: first values of the registers after the ones in the list.
        last_call: gets the number of each call, which `next_call` returns.
        recorded: does the same while something records it; None: nothing does.
    """
    writer = TaskWriter(binding, _passes(binding))
    writer.names |= {"further": list(further), "last_call": last_call, "next_call": next_call}
    writer.names |= {"recorded": recorded}
    writer.names |= {"recording": recording, "profiler_runs": profiler_runs}
    returned = "".join(f"r[{register}], " for register in results)
    asks = ["if recording.active or profiler_runs():", "    return recorded(given)"]  # no calls
    lines = [
        "last_call[0] = next_call()",
        *(asks if recorded is not None else ()),
        "r, k = given + further, 0",
        "given.clear()",
        *(line for of in writer.lines for line in of),
        f"return ({returned})",
    ]
    return writer.function("call", "given", lines)
