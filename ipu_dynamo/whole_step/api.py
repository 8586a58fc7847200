"""Compile a model, or a whole training step, without torch.compile: the core's own door."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ipu_dynamo.capture.swap import Model
from ipu_dynamo.errors import CompileError, OptionError
from ipu_dynamo.options import Options
from ipu_dynamo.program import Clip
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.optimizer.function_update import TracedUpdate
from ipu_dynamo.whole_step.optimizer.host_step import describe_host
from ipu_dynamo.whole_step.optimizer.optimizer_checkpoints import follow_checkpoints
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group, describe, has_rule
from ipu_dynamo.whole_step.optimizer.traced_optimizer import TracedOptimizer


def compile_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options | dict[str, Any] | None = None,
    *,
    loss: int | None = None,
    clip: Clip | None = None,
    update: Literal["program", "host"] = "program",
    accumulator_dtypes: Mapping[str, torch.dtype] | None = None,
) -> CompiledModel:
    """Make a whole training step one program: forward, loss, backward, accumulation, update.

    Each call trains the model's parameters in place.

    Args:
        model: its forward computes the loss, with a torch loss function or `identity_loss`.
        optimizer: over the model's parameters. The step of torch.optim.SGD, Adam, AdamW and RMSprop
            is known, that of any other is traced from its Python; `TracedUpdate` is one function of
            all gradients, weights and states. Changes of its numbers, by a scheduler for instance,
            act from the next call on.
        options: see `ipu_dynamo.Options`.
        loss: index of the returned tensor to minimise, instead of the marked value.
        clip: how the gradients of all trained parameters together are clipped before each update,
            once they are summed over micro-batches and replicas and averaged: `ClipGradNorm` or
            `ClipGradValue`, which do what torch.nn.utils does, or `ClipGlobalNorm`.
        update: `program`, the update is part of it; `host`, the program ends with the gradients,
            and `optimizer.step()` runs in Python after each of its steps. That takes any optimiser
            that needs no closure.
        accumulator_dtypes: in which the gradients of parameters are summed over micro-batches and
            replicas, by the parameters' names. Others are summed in their own; halves in float32.

    Example:
        step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in data:
            loss = step(x, y)
    """
    step = training_step(
        model,
        optimizer,
        options,
        loss=loss,
        clip=clip,
        update=update,
        accumulator_dtypes=accumulator_dtypes,
    )
    newest = follow_checkpoints(step, optimizer)
    if update != "host":  # whose states are the optimiser's own
        step.newest_state = newest
    return step


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options | dict[str, Any] | None,
    *,
    loss: int | None = None,
    clip: Clip | None = None,
    update: Literal["program", "host"] = "program",
    accumulator_dtypes: Mapping[str, torch.dtype] | None = None,
) -> CompiledModel:
    """Check the arguments of `compile_training` and make its step; the optimiser stays as it is."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CompileError(
            f"training needs an optimizer, got {optimizer!r}",
            hint="pass one of torch.optim, and compute the loss in the model's forward; without "
            "training, use compile_inference",
        )
    options = Options.read(options)
    if loss is not None and not isinstance(loss, int):
        raise CompileError(
            f"loss is {loss!r}, not the index of a returned tensor",
            hint="count the returned tensors from 0, nested ones in order",
        )
    if clip is not None and not isinstance(clip, Clip):
        raise CompileError(
            f"clip is {clip!r}, which is no rule",
            hint="pass ClipGradNorm, ClipGradValue or ClipGlobalNorm with its limit",
        )

    if update not in ("program", "host"):
        raise OptionError(f"update is {update!r}; choose program or host")
    dtypes = dict(accumulator_dtypes or {})
    if wrong := [name for name, dtype in dtypes.items() if not dtype.is_floating_point]:
        raise OptionError(
            f"accumulator_dtypes has {dtypes[wrong[0]]} for {wrong[0]}; choose a floating one"
        )
    if isinstance(optimizer, TracedUpdate):
        optimizer.use_parameters_of(model)
    on_host = update == "host"
    if on_host and options.grid[1] > 1:
        raise OptionError(
            'update="host" needs all gradients on one rank, and the mesh cuts the model by its '
            'dimension ipu\n  try:  update="program", or a mesh with the dimension replica alone'
        )
    if on_host and options.guard_updates:
        raise OptionError(
            'guard_updates keeps variables of the program, and an optimiser with update="host" has'
            " states of its own; leave guard_updates out, or train without update"
        )
    traced = None if on_host or has_rule(optimizer) else TracedOptimizer(options)

    def read(given: Any, parameters: Mapping[str, Tensor]) -> tuple[Group, ...]:
        known = describe_host if on_host else describe
        groups = (known if traced is None else traced.describe)(given, parameters)
        return tuple(
            replace(
                group,
                clip=clip,
                accumulator_dtypes={n: dtypes[n] for n in group.parameters if n in dtypes},
            )
            for group in groups
        )

    return CompiledModel(
        model, options, optimizer=optimizer, loss=loss, describe=read, traced=traced
    )


def compile_inference(
    model: Model,
    options: Options | dict[str, Any] | None = None,
    *,
    own_weights: bool = False,
) -> CompiledModel:
    """Make the forward pass one program, on the model's own parameters or on copies of them.

    Args:
        model: a module or a function on tensors; its train or eval mode is read when compiling.
        options: see `ipu_dynamo.Options`.
        own_weights: compute on copies of parameters and buffers, which `write_weights` renews
            when the model's have changed. Tensors that only the program can write may also be kept
            in the order that its matrix products read fastest.
    """
    return CompiledModel(model, Options.read(options), optimizer=None, own_weights=own_weights)
