"""Check compiled programs: refuse those that an IPU system, or PopTorch, would refuse."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ipu_dynamo.ops.private.native import NormBase
from ipu_dynamo.program import Collective, Program
from poptorch._logging import logger
from poptorch.errors import createPoptorchError
from poptorch.hardware import MOST_IPUS
from poptorch.options import Options, uses_ipu_model


def check_program(
    program: Program, model: Any, options: Options, buffers: Collection[str], *, replicas: int
) -> None:
    """Refuse a program that no executor may run.

    Args:
        buffers: names of the model's buffers.
        replicas: of all processes that run the program together.

    Raises:
        poptorch.Error: no system has this number of IPUs, replicas would sum truth values or each
            change its own buffers, or an updatable buffer does not exist. Or replicas of processes
            that are not connected exchange tensors.
    """
    check_ipus(program.num_ipus, options)
    _check_sums(program)
    _check_buffers(program, model, options, replicas)
    _check_exchanges(program, options, replicas)
    for name in options._Popart.options.get("updatableNamedBuffers", ()):
        if name not in buffers:
            raise createPoptorchError(
                f"updatableNamedBuffers names {name}, which is no buffer of the model: its buffers "
                f"are {', '.join(buffers) or 'none'}",
                id="option",
            )


def check_model(model: Any) -> None:
    """Refuse a model that the machine could not run as PyTorch does.

    Raises:
        poptorch.Error: a normalisation that averages all batches seen so far.
    """
    if not isinstance(model, nn.Module):
        return
    for name, module in model.named_modules():
        cumulative = isinstance(module, NormBase) and module.momentum is None
        if cumulative and module.training and module.track_running_stats:
            raise createPoptorchError(
                f"{name or type(module).__name__} has momentum=None: the number of batches is a "
                "constant of the program, so give a momentum",
                id="model",
            )


def check_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that updates nothing of the model; say what it leaves out by mistake.

    Raises:
        poptorch.Error: all its parameters are of another model.
    """
    if not isinstance(model, nn.Module):
        return
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if own and not own & given:
        raise createPoptorchError(
            f"the optimizer has {len(given)} parameters, but none of {type(model).__name__}, which "
            "is to be trained: it was made for another model, or for parameters that were replaced "
            "since. Make it from model.parameters() of this model",
            id="gradient",
        )
    strays = given - {id(parameter) for parameter in model.parameters()}
    left_out = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in given
    ]
    if strays and left_out:  # leaving parameters out on purpose is PopTorch's way to freeze them
        logger.warning(
            "the optimizer has %d parameters that are none of %s, and has not got %s, which are "
            "not trained: if they were replaced since, make it from model.parameters() again",
            len(strays),
            type(model).__name__,
            ", ".join(left_out),
        )


def check_ipus(num_ipus: int, options: Options) -> None:
    """Refuse a number of IPUs that no system reserves.

    Args:
        num_ipus: of one replica.

    Raises:
        poptorch.Error: more than 64, or no power of 2 where a device is asked for.
    """
    wanted = num_ipus * options.replication_factor
    if wanted > MOST_IPUS:
        raise createPoptorchError(
            f"Too many IPUs requested ({wanted}). Experiments that need more than {MOST_IPUS} IPUs "
            "require distributed execution.",
            id="device",
        )
    reserved = 1 << (wanted - 1).bit_length()
    if reserved == wanted or uses_ipu_model(options):
        return
    if options.auto_round_num_ipus:
        logger.warning(
            "The model uses %d IPUs: %d are reserved, of which %d stay idle, because their number "
            "must be a power of 2",
            wanted,
            reserved,
            reserved - wanted,
        )
        return
    raise createPoptorchError(
        f"The model specifies the use of {wanted} IPUs, however PopTorch must reserve a minimum of "
        f"{reserved} in order to allow the model to run, because PopTorch must reserve a power of "
        f"2 or maximum of {MOST_IPUS} IPUs per process. Please reconfigure your model to use a "
        "different number of IPUs or set poptorch.Options().autoRoundNumIPUs(True).",
        id="device",
    )


def _check_sums(program: Program) -> None:
    for output in program.outputs:
        if output.returns == "sum" and output.type.dtype == torch.bool:
            raise createPoptorchError(
                f"OutputMode.Sum cannot add up output {output.name}, which is bool: return it as "
                "an integer",
                id="option",
            )


def _check_exchanges(program: Program, options: Options, replicas: int) -> None:
    wanted = options.replication_factor * options.Distributed.numProcesses
    if replicas != wanted and any(isinstance(i, Collective) for i in program.walk()):
        raise createPoptorchError(
            f"replicas exchange tensors in this model, but those of {wanted} are in "
            f"{options.Distributed.numProcesses} processes that no process group connects: call "
            "popdist.init() first",
            id="option",
        )


def _check_buffers(program: Program, model: Any, options: Options, replicas: int) -> None:
    groups = replicas // options.input_group_size
    if groups == 1 or not options.broadcast_buffers or not isinstance(model, nn.Module):
        return
    statistics = {
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        if isinstance(module, NormBase)
        for buffer in module._buffers
    }
    changed = [
        variable.name
        for variable in program.variables
        if variable.kind in ("buffer", "parameter")
        and not variable.replicated
        and variable.name not in statistics
    ]
    if changed:
        raise createPoptorchError(
            "PopTorch does not support broadcasting buffers. If your model is able to tolerate "
            "buffers becoming out of sync between replicas, you can disable buffer broadcasting "
            "using poptorch.Options.broadcastBuffers(False). "
            f"The model changes {', '.join(changed)}",
            id="model",
        )
