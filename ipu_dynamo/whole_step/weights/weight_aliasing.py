"""Refuse a program whose weights cannot be the model's own tensors, or copies of these."""

from itertools import combinations

from ipu_dynamo.capture.private.aot import overlapping_tensors
from ipu_dynamo.errors import CompileError
from ipu_dynamo.program import WriteBuffer
from ipu_dynamo.whole_step.compile_model import Compiled
from ipu_dynamo.whole_step.weights.initial_state import updates


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


def refuse_shared_memory(compiled: Compiled) -> None:
    """Check that tensors that the program has copies of share no element that a step writes.

    One tensor under several names is one variable, and fine.

    Raises:
        CompileError: two do; their copies would go ways of their own.
    """
    program = compiled.program
    written = {name for update in updates(program) for name in update.parameters}
    written |= {n for i in program.walk() if isinstance(i, WriteBuffer) for n in i.variables}
    by_storage: dict[int, list[str]] = {}
    for variable in program.variables:
        if variable.kind in ("parameter", "buffer") and variable.name in compiled.tensors:
            storage = compiled.tensors[variable.name].untyped_storage().data_ptr()
            by_storage.setdefault(storage, []).append(variable.name)
    for names in by_storage.values():
        for first, second in combinations(names, 2):
            pair = [compiled.tensors[name] for name in (first, second)]
            if written.isdisjoint((first, second)) or not overlapping_tensors(pair):
                continue
            raise CompileError(
                f"{first} and {second} are two tensors that share memory, and training changes it",
                hint="assign one tensor to both (layer.weight = other.weight), not its data",
            )
