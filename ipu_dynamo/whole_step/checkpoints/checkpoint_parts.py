"""Name the parts of a training step that a checkpoint has: tensors, states and updates."""

from collections.abc import Iterable

from torch import Tensor

from ipu_dynamo.errors import InputError
from ipu_dynamo.program import Program, Variable
from ipu_dynamo.program.ir.made_names import made_of
from ipu_dynamo.program.ir.update_rules import TracedRule
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.optimizer.optimizer_sync import state_names
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group
from ipu_dynamo.whole_step.saving.save import every_tensor

REPLICA = made_of("", "replica")  # between a buffer's name and a number; no user's name has it


def check_step(step: object) -> None:
    """Raise InputError for anything but a compiled training step."""
    if not isinstance(step, CompiledModel):
        kind = f"{type(step).__module__}.{type(step).__qualname__}"
        raise InputError(f"a {kind} has no checkpoints", hint="pass what compile_training returned")
    if not step.training:
        hint = "save model.state_dict(), or train with compile_training"
        raise InputError("a program for inference has no checkpoints", hint=hint)


def weights_of(step: CompiledModel) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a model, each under its first name, and the names that its state has."""
    tensors: dict[str, Tensor] = {}
    kept: list[str] = []
    for name, first, tensor, persistent in every_tensor(step):
        tensors.setdefault(first, tensor)
        if name == first and persistent:
            kept.append(name)
    if step.is_compiled and step.parts.own_weights:
        tensors |= {name: step.executable.whole(name) for name in step.weights()}
    return tensors, kept


def own_buffers(program: Program) -> list[Variable]:
    """The buffers of which each replica has its own."""
    return [
        variable
        for variable in program.variables
        if variable.kind == "buffer" and not variable.replicated and variable.groups is None
    ]


def states_of(program: Program) -> dict[str, str]:
    """The variables of all states, by their names in checkpoints, which are PyTorch's."""
    scale = {v.name: v.name for v in program.variables if v.kind == "loss_scale"}
    named = state_names(program).items()
    return scale | {f"{of}.{state}" if of else state: name for (of, state), name in named}


def rules_of(groups: Iterable[Group]) -> dict[str, str]:
    """How each parameter is updated. Of traced rules the functions may differ: they are traced for
    numbers, and for the states that there are."""
    return {
        name: f"traced {rule.name}" if isinstance(rule, TracedRule) else str(rule)
        for rule, parameters in ((group.rule, group.parameters) for group in groups)
        for name in parameters
    }


def on_replica(name: str, replica: int) -> str:
    """The name of a buffer on a replica."""
    return f"{name}{REPLICA}{replica}" if replica else name
