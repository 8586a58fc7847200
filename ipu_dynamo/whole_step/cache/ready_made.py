"""Use a program that was compiled before for a model that is traced again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.errors import CompileError
from ipu_dynamo.passes.program.emit_update import UpdateGroup
from ipu_dynamo.program import HostProgram, Update
from ipu_dynamo.tune.figures import Figures

_HINT = "use the model, the options and the inputs that the program was compiled for"


@dataclass(frozen=True)
class ReadyMade:
    """A program, and the facts that compiling the model again would find.

    Args:
        host: the program, in the form for this computer.
        constants: values of its variables that are not tensors of the model.
        input_names: the program's names of the caller's tensors, in order.
        names, gradients, anchors: of values, as `Compiled` has them.
        figures: that decide how functions are compiled; None: those of this machine.
    """

    host: HostProgram
    constants: Mapping[str, Tensor]
    input_names: tuple[str, ...]
    names: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    anchors: Mapping[str, str] = field(default_factory=dict)
    figures: Figures | None = None


def check_fit(ready: ReadyMade, capture: Traced, groups: Sequence[UpdateGroup]) -> None:
    """Hold a traced model and an optimiser to a program that was compiled before.

    Raises:
        CompileError: the program is that of another model.
    """
    program = ready.host.program
    if (program.kind == "training") != capture.training:
        raise CompileError(f"the program is for {program.kind}", hint=_HINT)
    for variable in program.variables:
        if variable.kind not in ("parameter", "buffer"):
            continue
        tensor = capture.report.tensors.get(variable.name)
        shape = variable.type.shape
        if variable.groups is not None:
            shape = (variable.groups.count(program.replicas), *shape)
        if tensor is None or tuple(tensor.shape) != shape:
            has = "none" if tensor is None else f"one of shape {list(tensor.shape)}"
            problem = f"the program has {variable.kind} {variable.name} of shape {list(shape)}, "
            raise CompileError(f"{problem}the model {has}", hint=_HINT)
    inputs = tuple(role.name for role in capture.placeholders if role.kind == "input")
    if inputs != ready.input_names:
        problem = f"the program takes {', '.join(ready.input_names)}, the model {', '.join(inputs)}"
        raise CompileError(problem, hint=_HINT)
    anchored = set(ready.anchors.values())
    returned = sum(
        not output.mutates and output.printing is None and output.name not in anchored
        for output in program.outputs
    )
    if returned != len(capture.report.structure.tensors):
        problem = f"the program returns {returned} tensors, the model "
        raise CompileError(f"{problem}{len(capture.report.structure.tensors)}", hint=_HINT)
    for update in (i for i in program.walk() if isinstance(i, Update)):
        fits = update.group < len(groups) and groups[update.group].rule == update.rule
        if not fits or not set(update.parameters) <= set(groups[update.group].parameters):
            raise CompileError(f"the optimizer has no group for the update {update.rule}",
                               hint=_HINT)  # fmt: skip
