"""Find the weights that keep their values from call to call, so that they may be prepacked."""

from collections.abc import Sequence, Set

from ipu_dynamo.program import Call, Function, Program
from ipu_dynamo.program.schedule.dependencies import changed_variables


def constant_variables(program: Program) -> frozenset[str]:
    """The weights on the chips that `program` only reads."""
    changed = changed_variables(program)
    return frozenset(
        variable.name
        for variable in program.variables
        if program.kind == "inference" and variable.kind in ("parameter", "buffer")
        if not variable.off_chip and variable.name not in changed
    )


def constant_inputs(
    function: Function, calls: Sequence[Call], constants: Set[str]
) -> tuple[int, ...]:
    """Positions of the arguments that are constants in every call of a function."""
    given = [call.arguments for call in calls if call.function == function.name]
    columns = enumerate(zip(*given, strict=True))
    return tuple(i for i, names in columns if constants >= set(names))
