"""Refuse a program that cannot compute on the model's own tensors, where nobody exchanges them."""

from ipu_dynamo.errors import CompileError
from ipu_dynamo.whole_step.compile_model import Compiled


def refuse_what_cannot_be_shared(compiled: Compiled) -> None:
    """Check every parameter and buffer of the model.

    Raises:
        CompileError: the program would have it in another dtype, or on another device.
    """
    for variable in compiled.program.variables:
        tensor, device = compiled.tensors.get(variable.name), compiled.devices[variable.ipu]
        if tensor is None or variable.kind not in ("parameter", "buffer"):
            continue
        if tensor.dtype != variable.type.dtype:
            raise CompileError(
                f"{variable.kind} {variable.name} is {tensor.dtype}, which is carried as "
                f"{variable.type.dtype} with narrow=True",
                hint="convert the model first, for instance with model.float()"
                if tensor.is_floating_point()
                else f"register it as a tensor of {variable.type.dtype}",
            )
        if tensor.device != device:
            raise CompileError(
                f"{variable.kind} {variable.name} is on {tensor.device}, and IPU "
                f"{variable.ipu}, where it is used, on {device}",
                hint="move the model's layers to the devices of their IPUs first",
            )
