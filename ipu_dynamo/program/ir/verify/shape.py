"""Check the parts of a program, and that each instruction is in a loop where it may be."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ipu_dynamo.errors import ProgramError
from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.options.schedule_order import is_order, read_order
from ipu_dynamo.options.strategy import BY_NAME
from ipu_dynamo.program.ir.instructions import Call, Repeat
from ipu_dynamo.program.ir.made_names import is_made
from ipu_dynamo.program.ir.verify.control_flow import check_bodies
from ipu_dynamo.program.schedule.pipeline_orders import joins_last, misfit, order_of
from ipu_dynamo.program.schedule.sections import sections

if TYPE_CHECKING:
    from ipu_dynamo.program.ir.program import Program

_MADE = ("accumulator", "loss_scale", "state")  # kinds of variables


def check_tables(program: "Program") -> None:
    """Check variables, streams and functions, and that each has a name of its own."""
    if program.num_ipus < 1 or program.replicas < 1:
        raise ValueError(f"{program.num_ipus} IPUs and {program.replicas} replicas; from 1 on")
    shares = program.memory_proportions
    if len(shares) not in (0, program.num_ipus) or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"memory proportions {shares} of {program.num_ipus} IPUs; from 0 to 1")
    every = (*program.functions, *program.update_functions)
    for what, names in (
        ("variable", [variable.name for variable in program.variables]),
        ("input", [stream.name for stream in program.inputs]),
        ("output", [stream.name for stream in program.outputs]),
        ("function", [function.name for function in every]),
    ):
        if twice := next((name for name, n in Counter(names).items() if n > 1), None):
            raise ValueError(f"more than one {what} is called {twice}")
    check_names(program)
    check_bodies(every)
    for function in every:
        if function.written:
            raise ValueError(f"@{function.name} writes its argument {function.written[0]}")
    for variable in program.variables:
        if not 0 <= variable.ipu < program.num_ipus:
            raise ValueError(f"%{variable.name} lives on ipu{variable.ipu}, which does not exist")
        holders = sharing(variable.groups, program.replicas)
        if variable.shards not in (1, holders):
            raise ValueError(
                f"%{variable.name} is in {variable.shards} shards of {holders} replicas"
            )


def check_names(program: "Program") -> None:
    """Check that no tensor of the user's can have the name of one that a compiler makes."""
    for variable in program.variables:
        if variable.kind == "constant":
            continue  # a tensor of the user's, or numbers of random streams
        if is_made(variable.name) != (variable.kind in _MADE):
            has = "no" if variable.kind in _MADE else "an"
            problem = f"the name of {variable.kind} %{variable.name} has {has} empty part"
            raise ValueError(problem)
    for stream in program.inputs:
        if is_made(stream.name) != (stream.source != "host"):
            has = "an" if stream.source == "host" else "no"
            raise ValueError(f"the name of input %{stream.name} has {has} empty part")


def check_loops(program: "Program") -> None:
    """Check the loops of the body, and the section of each instruction."""
    loops = [instruction for instruction in program.walk() if isinstance(instruction, Repeat)]
    for loop in loops:
        if loop.count < 1:
            raise ProgramError("a loop runs once at least", loop)
        if loop.over == "device_iteration" and loop.order != "sequential":
            raise ProgramError("updates follow one another", loop)
        if loop.schedule and (loop.order, program.kind) != ("pipelined", "training"):
            raise ProgramError("only a pipeline for training has a schedule by name", loop)
    cut = sections(program)
    training = program.kind == "training"
    if training != (loops[0].over == "device_iteration"):
        needs = "needs one loop" if training else "has no loop"
        raise ValueError(f"a program for {program.kind} {needs} over device iterations")
    if cut.after and not training:
        raise ProgramError("only the step of a training program has an end", cut.after[0])
    (loop,) = (loop for loop in loops if loop.over == "micro_batch")
    if loop.schedule:
        _check_order(loop, [i for i in cut.loop if isinstance(i, Call)])
    for section, part, where in (
        ("before", cut.before, "before micro-batches"),
        ("loop", cut.loop, "within a micro-batch"),
        ("after", cut.after, "after micro-batches"),
    ):
        for instruction in part:
            if section not in instruction.sections:
                raise ProgramError(f"this cannot stand {where}", instruction)


def _check_order(loop: Repeat, calls: Sequence[Call]) -> None:
    """Check that calls are those of a schedule by name."""
    if not calls:
        raise ProgramError("a pipeline for training calls functions", loop)
    ipus = [ipu for _, ipu in sorted({call.stage: call.ipu for call in calls}.items())]
    directions = {call.direction for call in calls}
    if is_order(loop.schedule):
        read_order(loop.schedule)
    elif loop.schedule not in BY_NAME:
        raise ProgramError(f"no schedule is called {loop.schedule!r}", loop)
    if (against := misfit(loop.schedule, ipus, loop.count)) is not None:
        raise ProgramError(against[0], loop)
    order = order_of(loop.schedule, ipus, loop.count)
    if "forward_backward" in directions and not joins_last(order, len(ipus)):
        raise ProgramError("the schedule has the last stage's passes apart", loop)


def sharing(groups: ReplicaGroups | None, replicas: int) -> int:
    """How many replicas have the same values.

    Raises:
        ValueError: groups of this size do not make up all replicas.
    """
    if groups is None:
        return replicas
    if replicas % groups.size:
        raise ValueError(f"{replicas} replicas do not divide into each {groups}")
    return groups.size
