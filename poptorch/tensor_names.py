"""Call the tensors of a program as PopTorch does, and find the core's values by these names."""

from collections.abc import Iterable

from ipu_dynamo.whole_step.compiled_model import CompiledModel

GRADIENT, UPDATED, SPECIFIC = "Gradient___", "UpdatedVar___", "___specific___"
FINAL_LOSS_SCALE, LOSS_SCALING = "finalLossScale", "lossScaling_FLOAT"
UPDATE_FACTOR = "lossScaleUpdateFactor"
_STATES = ("Accl___", "Accl1___", "Accl2___", "Accl3___", "Accum___", "Step___")


def is_of_optimizer(name: str) -> bool:
    """Whether a tensor is called as one of the optimizer's: its state, or a number."""
    return SPECIFIC in name or name in (LOSS_SCALING, UPDATE_FACTOR) or name.startswith(_STATES)


def input_names(arguments: Iterable[str]) -> dict[str, str]:
    """The core's names of the tensors among a call's arguments, in order, by PopTorch's."""
    return {f"input/{number}" if number else "input": name for number, name in enumerate(arguments)}


def tensor_names(core: CompiledModel, of_optimizer: Iterable[str]) -> list[str]:
    """The names of all tensors of a compiled model, sorted.

    Args:
        of_optimizer: the names of its state and of its numbers on the device.
    """
    names, kinds = core.value_names, {v.name: v.kind for v in core.program.variables}
    held = [name for name in names.variables if kinds.get(name) in ("parameter", "buffer")]
    return sorted(
        {
            *held,
            *input_names(names.inputs),
            *names.operators,
            *(f"{GRADIENT}{name}" for name in names.gradients),
            *(f"{UPDATED}{name}" for name in names.updates),
            *of_optimizer,
        }
    )
