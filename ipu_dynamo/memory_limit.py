"""Refuse programs that do not fit in the memory of IPUs, where users ask for it.

`Options(enforce_memory="bow")` or the environment variable names the IPUs. Without either nothing
is predicted, and `ipu_dynamo.machine` is not imported.
"""

import os

from ipu_dynamo import noted_warnings
from ipu_dynamo.errors import OutOfMemory
from ipu_dynamo.program import Program
from ipu_dynamo.program.ir.types import byte_text

ENFORCE_MEMORY = "IPU_DYNAMO_ENFORCE_MEMORY"  # environment variable: the name of IPUs
_LARGEST = 5


def enforce_memory(program: Program, machine: str | None) -> None:
    """Raise if a program does not fit; warn if it may not.

    Args:
        machine: the name in the options. None: that of the environment variable, if it is set.
            Empty: no check.

    Raises:
        OutOfMemory: not even the low estimate of its bytes fits.
        OptionError: IPUs of that name are unknown, or too few.
    """
    name = os.environ.get(ENFORCE_MEMORY) if machine is None else machine
    if not name:
        return
    from ipu_dynamo.machine.predict_program import predict_program  # others do not pay for it

    prediction = predict_program(program, name)
    verdict = prediction.verdict
    if verdict.word == "fits":
        return
    ipu = prediction.ipus[verdict.ipu].memory
    low, central, high = map(byte_text, (verdict.tile.low, verdict.tile.central, verdict.tile.high))
    whole = ", ".join(map(byte_text, (ipu.total.low, ipu.total.central, ipu.total.high)))
    if verdict.word == "tight":
        noted_warnings.warn(
            f"the program may not fit on {prediction.system}: the fullest tile of IPU "
            f"{verdict.ipu} needs {low} to {high}, and has {byte_text(verdict.limit)}",
        )
        return
    largest = [
        f"  {byte_text(tensor.nbytes):>9}  %{tensor.name}: {tensor.type}, "
        f"{tensor.line or tensor.maker}"
        for tensor in ipu.peak.tensors[:_LARGEST]
    ]
    lines = (
        f"the {program.kind} program does not fit on {prediction.system}: the fullest tile of IPU "
        f"{verdict.ipu} needs {central} ({low} to {high}), and has {byte_text(verdict.limit)}",
        f"  the IPU needs {whole} (low, central, high), and has {byte_text(ipu.limit)}; "
        "its largest tensors are",
        *largest,
    )
    raise OutOfMemory(
        "\n".join(lines),
        hint="recompute activations, take a smaller micro-batch or more IPUs, or keep the "
        "optimizer's state off the chip; ipu_dynamo.predict shows all of it",
    )
