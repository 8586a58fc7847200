"""Say how an executable runs its program."""

from collections.abc import Iterator, Sequence

from ipu_dynamo.program import Copy, Decision, HostProgram
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.recipe import Recipe
from ipu_dynamo.program.schedule.dependencies import changed_variables
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import instructions_of_passes, stage_passes
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.engines.replay.replay import Replay
from ipu_dynamo.runtime.execute.fused_step import FusedStep
from ipu_dynamo.runtime.execute.tasks.micro_batch_loop import MicroBatchLoop
from ipu_dynamo.runtime.execute.tasks.task_code import Binding, TaskWriter


def plan_of(
    host: HostProgram,
    engine: Engine,
    form: FusedStep | MicroBatchLoop,
    schedule: Schedule,
    devices: Sequence[object],
) -> HostPlan:
    """The plan of an executable.

    Args:
        form: how a step runs.
    """
    program, threads = host.inlined, host.threads
    kinds = tuple(dict.fromkeys(map(str, devices)))
    cut = sections(program)
    if isinstance(form, FusedStep):
        now = form.now
        decisions = (*now.host.decisions, *_checks(engine, now.binding))
        writer = TaskWriter(now.binding, [now.instructions])
        (lines,) = writer.texts()
        first = now.first_new
        new = f"variables become what r{first} and those behind it hold, which is the commit"
        return HostPlan(
            engine.name, kinds, threads, decisions, _recipes(now.binding),
            _names(now.binding), (("fused step", (*lines, new, *_repeated(now.replay))),),
            (), (), (), "",
        )  # fmt: skip
    decisions = (*host.decisions, *_checks(engine, form.binding))
    ran = form.binding.program
    loop = sections(ran).loop
    passes = stage_passes(ran.calls)
    texts = TaskWriter(form.binding, instructions_of_passes(loop)).texts()
    titles = [
        f"pass {number}, {calls[0].direction} of stage {calls[0].stage} on ipu{calls[0].ipu}"
        for number, calls in enumerate(passes)
    ]
    copies = [i for i in cut.before if isinstance(i, Copy)]
    (copied,) = TaskWriter(form.binding, [copies]).texts()
    others = [str(i) for i in cut.before if not isinstance(i, Copy)]
    changed = changed_variables(ran)
    sums = [v.name for v in program.variables if v.kind == "accumulator"]
    undone = [f"clear {name}" for name in sums]
    undone += [f"put back {v.name}" for v in program.variables if v.name in changed - {*sums}]
    return HostPlan(
        engine.name, kinds, threads, decisions, _recipes(form.binding),
        _names(form.binding),
        tuple(zip(titles, map(tuple, texts), strict=True)), (*others, *copied),
        tuple(map(str, cut.after)), tuple(undone), str(schedule),
    )  # fmt: skip


def _repeated(replay: Replay | str | None) -> Iterator[str]:
    """How the steps of a call follow one another, where they are to be repeated."""
    if isinstance(replay, Replay):
        tape = replay.tape
        overwritten = f"{len(replay.in_place)} of {tape.signature.states} states overwritten"
        calls = f"{tape.kernels} kernels and {tape.matmuls} matmuls a step"
        yield f"repeated without Python: {calls}, {overwritten}"
    elif replay is not None:
        yield f"called by Python: {replay}"


def _checks(engine: Engine, binding: Binding) -> Iterator[Decision]:
    """What came of the checks of compiled functions."""
    return engine.checks.decisions([*binding.stages])


def _recipes(binding: Binding) -> tuple[Recipe, ...]:
    return tuple(recipe for recipe, _ in binding.stages.values())


def _names(binding: Binding) -> tuple[tuple[str, ...], ...]:
    """The names of every register."""
    names: dict[int, list[str]] = {}
    for name, register in binding.registers.items():
        names.setdefault(register, []).append(name)
    return tuple(tuple(names[register]) for register in sorted(names))
