"""Say how an executable runs its program."""

from collections.abc import Iterator, Sequence

from ipu_dynamo.program import Decision, HostProgram
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import instructions_of_passes, stage_passes
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.tasks.task_code import Binding, TaskWriter


def plan_of(
    host: HostProgram,
    engine: Engine,
    devices: Sequence[object],
    binding: Binding,
    passes: Sequence[tuple[str, tuple[str, ...]]],
    *,
    before: Sequence[str] = (),
    commit: Sequence[str] = (),
    undone: Sequence[str] = (),
    workers: str = "",
) -> HostPlan:
    """The plan of a form of a step.

    Args:
        passes: titles and lines of the tasks.
        before, commit: the lines before and after these.
        undone: the line about a step that fails.
    """
    kinds = tuple(dict.fromkeys(map(str, devices)))
    decisions = (*host.decisions, *_checks(engine, binding))
    return HostPlan(
        engine.name, kinds, host.threads, decisions, _recipes(binding), _names(binding),
        tuple(passes), tuple(before), tuple(commit), tuple(undone), workers,
    )  # fmt: skip


def described_passes(binding: Binding) -> list[tuple[str, tuple[str, ...]]]:
    """Title and lines of each stage pass of a micro-batch; none, if a rank has no pass."""
    texts = TaskWriter(binding, instructions_of_passes(sections(binding.program).loop)).texts
    titles = [
        f"pass {number}, {calls[0].direction} of stage {calls[0].stage} on ipu{calls[0].ipu}"
        for number, calls in enumerate(stage_passes(binding.program.calls))
    ]
    return [*zip(titles, map(tuple, texts), strict=bool(titles))]


def _checks(engine: Engine, binding: Binding) -> Iterator[Decision]:
    """Yield the outcomes of the checks of compiled functions."""
    return engine.checks.decisions([*binding.stages])


def _recipes(binding: Binding) -> tuple[FunctionRecipe, ...]:
    return tuple(recipe for recipe, _ in binding.stages.values())


def _names(binding: Binding) -> tuple[tuple[str, ...], ...]:
    """The names of every register."""
    names: dict[int, list[str]] = {}
    for name, register in binding.registers.items():
        names.setdefault(register, []).append(name)
    return tuple(tuple(names[register]) for register in sorted(names))
