"""Predict memory, cycles and a verdict for a model or a program on an IPU system."""

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ipu_dynamo.errors import InputError
from ipu_dynamo.machine.ipu import Ipu
from ipu_dynamo.machine.predict_program import predict_program
from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.machine.system import System, system_of
from ipu_dynamo.options import Options
from ipu_dynamo.program import Program
from ipu_dynamo.whole_step.api import compile_inference, training_step
from ipu_dynamo.whole_step.compiled_model import CompiledModel


def predict(
    what: Any,
    *args: Any,
    machine: str | Ipu | System = "bow",
    optimizer: torch.optim.Optimizer | None = None,
    options: Options | dict[str, Any] | None = None,
    loss: int | None = None,
    **kwargs: Any,
) -> Prediction:
    """Predict memory and cycles on IPUs. Nothing runs, and no tensor is made.

        model = BertForPreTraining(config).to("meta")
        print(predict(model, ids, labels, optimizer=AdamW(model.parameters()), machine="bow-pod16"))

    Args:
        what: a program; a compiled model; or a module or function with the arguments of one
            micro-batch. A model and its arguments may be on the meta device, but for tensors whose
            values become constants of the program.
        args: positional arguments, of one micro-batch. For a compiled model that has not run yet,
            those of a call; its program is made and thrown away.
        machine: the name of a system, such as `bow-pod16`, a `System`, or an `Ipu` of which there
            are as many as the program needs.
        optimizer: of a training step, as for `compile_training`. Without it, the program infers.
        options: see `ipu_dynamo.Options`.
        loss: as for `compile_training`.
        kwargs: keyword arguments, of the same size.

    Raises:
        OptionError: the machine is not known, or has too few IPUs.
        CompileError: the model cannot be compiled.
        InputError: arguments that are not wanted here.
    """
    system = system_of(machine)
    given = optimizer is not None or options is not None or loss is not None
    if isinstance(what, Program):
        if args or kwargs or given:
            raise InputError("a program is predicted as it is, without arguments and options")
        return predict_program(what, system)
    if isinstance(what, CompiledModel):
        if given:
            raise InputError("a compiled model has its optimizer and options already")
        model, program = what, what.program_for(args, kwargs)
    elif callable(what):
        if optimizer is None and loss is not None:
            raise InputError("a loss belongs to training, which needs an optimizer")
        model = (
            compile_inference(what, options)
            if optimizer is None
            else training_step(what, optimizer, Options.read(options), loss=loss)
        )
        program = model.program_for(args, kwargs, micro_batch=True)
    else:
        raise InputError(
            f"{type(what).__name__} is no model and no program",
            hint="pass a module, a function, a compiled model or a Program",
        )
    name = _name(model.model)
    return predict_program(
        program,
        system,
        model=name,
        command=f"ipu_dynamo.predict({name}, ..., machine={system.name!r})",
        options=_changed(model.options),
    )


def _changed(options: Options) -> list[str]:
    """The options that differ from their defaults."""
    plain = Options()
    pairs = ((each.name, getattr(options, each.name)) for each in fields(options))
    return [f"{name}={value!r}" for name, value in pairs if value != getattr(plain, name)]


def _name(model: Any) -> str:
    if isinstance(model, nn.Module):
        return type(model).__name__
    return str(getattr(model, "__name__", type(model).__name__))
