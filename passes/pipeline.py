"""Hold the order of the passes, on one page, and run them."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ipu_dynamo.capture.capture import Capture, Pass
from ipu_dynamo.errors import CompileError
from ipu_dynamo.options import OptionError, Options
from ipu_dynamo.options.devices import devices_of_ipus
from ipu_dynamo.passes.host.accumulate_in_loop import accumulate_in_loop
from ipu_dynamo.passes.host.accumulate_matmuls import accumulate_products
from ipu_dynamo.passes.host.fuse_loss import one_sweep
from ipu_dynamo.passes.host.set_stage_device import retarget
from ipu_dynamo.passes.joint.annotate_stages import read_stages
from ipu_dynamo.passes.joint.assign_gradient_stages import place_gradients
from ipu_dynamo.passes.joint.counter_random import random_streams
from ipu_dynamo.passes.joint.floating_point_exceptions import FloatingPointExceptions
from ipu_dynamo.passes.joint.half_partials import HalfPartials
from ipu_dynamo.passes.joint.partition import Accumulation, Partition
from ipu_dynamo.passes.joint.recompute import Recompute
from ipu_dynamo.passes.joint.round_scalars import round_scalars
from ipu_dynamo.passes.joint.scale_loss import ScaleLoss
from ipu_dynamo.passes.joint.schedule_convolution_groups import group_convolutions
from ipu_dynamo.passes.joint.serialize_loss import serialize_loss
from ipu_dynamo.passes.joint.serialize_matmul import serialize_matmul
from ipu_dynamo.passes.joint.stochastic_rounding import StochasticRounding
from ipu_dynamo.passes.joint.upcast_half_matmuls import float_products
from ipu_dynamo.passes.program.emit import emit
from ipu_dynamo.passes.program.emit_update import UpdateGroup
from ipu_dynamo.passes.program.outline import Outline
from ipu_dynamo.passes.program.split_weight_gradients import split_weight_gradients
from ipu_dynamo.passes.traced.auto_partition import AutoPartition
from ipu_dynamo.passes.traced.differentiate import Differentiate
from ipu_dynamo.passes.traced.identity_loss import IdentityLoss
from ipu_dynamo.passes.traced.narrow_types import Precision
from ipu_dynamo.passes.traced.overlap_io import OverlapIO
from ipu_dynamo.passes.traced.placement import Placement
from ipu_dynamo.passes.traced.tag_convolution_groups import mark_convolutions
from ipu_dynamo.program import Program

log = logging.getLogger(__name__)
DUMP = "IPU_DYNAMO_DUMP"  # environment variable: a folder for the graph after each pass


def pipeline(options: Options, *, training: bool, loss: int | None = None) -> tuple[Pass, ...]:
    """The passes from a traced model to a placed, differentiated graph, in order.

    `partition` and `emit`, which turn that graph into a program, follow in `lower`.
    """
    strategy = options.strategy
    count = options.gradient_accumulation if training else options.device_iterations
    cutting: tuple[Pass, ...] = ()
    if strategy.ipus is not None:
        cutting = (AutoPartition(strategy, count, options.recomputes != "off"),)
    return (
        OverlapIO(options),
        mark_convolutions,
        *cutting,
        Placement(strategy, count),
        IdentityLoss(loss),
        Precision(options.narrow),
        Differentiate(start_gradient(options)),
        serialize_loss,
        serialize_matmul,
        round_scalars,
        random_streams,
        place_gradients,
        _scale_loss(options),
        group_convolutions,
        _half_partials(options),
        float_products,
        StochasticRounding(options.stochastic_rounding),
        Recompute(options.recomputes, options.recompute_budget),
        FloatingPointExceptions(options.floating_point_exceptions),
    )


def lone_pipeline(options: Options) -> tuple[Pass, ...]:
    """The passes for a graph that was placed and differentiated outside, by AOTAutograd.

    Raises:
        OptionError: for stochastic rounding, whose random stream such a program does not have.
    """
    if options.stochastic_rounding:
        raise OptionError(
            "option stochastic_rounding does not work through torch.compile; use "
            "ipu_dynamo.compile_training or compile_inference"
        )
    return (*placed_pipeline(), *numeric_pipeline(options))


def placed_pipeline() -> tuple[Pass, ...]:
    """Those that read where it was placed; after them a graph can be split into micro-batches."""
    return (read_stages, serialize_loss, serialize_matmul, round_scalars, place_gradients)


def numeric_pipeline(options: Options) -> tuple[Pass, ...]:
    """Those that decide how values are computed and rounded, and what is checked."""
    return (
        _half_partials(options),
        float_products,
        FloatingPointExceptions(options.floating_point_exceptions),
    )


def lower(
    capture: Capture,
    options: Options,
    groups: Sequence[UpdateGroup] = (),
    *,
    passes: Sequence[Pass],
    part: str | None = None,
    acted: list[str] | None = None,
    devices: Sequence[torch.device] = (),
) -> Program:
    """Run `passes`, cut the graph into stages, and write the program.

    Args:
        part: folder for dumps inside the one that IPU_DYNAMO_DUMP names.
        acted: gets the names of passes that changed the graph.
        devices: one for all IPUs, or one for each; none: the graph is left on its device.

    Raises:
        CompileError: from the pass that finds the fault; a note names it.
    """
    dump = _Dump(os.environ.get(DUMP), part or capture.alone)
    dump.write("traced", capture.graph.graph)
    changed = run(passes, capture, dump)
    if acted is not None:
        acted += changed
    partitioned = Partition(_accumulation(options))(capture)
    for one in partitioned.parts:
        accumulate_in_loop(one.graph)
        one_sweep(one.graph)
        accumulate_products(one.graph)
    if capture.training and options.strategy.schedule == "zero_bubble":
        partitioned = split_weight_gradients(partitioned)
    outlined = Outline(options.outline)(partitioned)
    if acted is not None and len(outlined.parts) > len(partitioned.parts):
        acted.append("Outline")
    partitioned = outlined
    of_ipus = devices_of_ipus(devices, max(capture.ipus.values()) + 1) if devices else ()
    for one in partitioned.parts if of_ipus else ():
        retarget(one.graph.graph, of_ipus[one.ipu])
        one.graph.recompile()
    program = emit(capture, partitioned, options, groups)
    dump.write("program", program)
    return program


def run(passes: Sequence[Pass], capture: Capture, dump: "_Dump | None" = None) -> tuple[str, ...]:
    """Run `passes` in order; return the names of those that changed the graph.

    Raises:
        CompileError: from the pass that finds the fault; a note names it.
    """
    acted = []
    for one in passes:
        name = getattr(one, "__name__", repr(one))
        try:
            changed = one(capture)
        except CompileError as error:
            error.add_note(f"in pass {name}")
            raise
        if changed:
            capture.check()
            acted.append(name.partition("(")[0])
        log.debug("%s: %s", name, "changed the graph" if changed else "nothing to do")
        if dump is not None:
            dump.write(name.partition("(")[0], capture.graph.graph)
    return tuple(acted)


class _Dump:
    """Write numbered files to a folder, or to `part` inside it; nothing without a folder."""

    def __init__(self, folder: str | None, part: str | None) -> None:
        self.folder = Path(folder, part or "") if folder else None
        self.count = 0
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, shown: object) -> None:
        if self.folder is not None:  # only then is it made a text: that takes as long as a pass
            (self.folder / f"{self.count:02}_{name.lower()}.txt").write_text(f"{shown}\n")
            self.count += 1


def start_gradient(options: Options) -> float:
    """What the backward pass begins with, at the loss."""
    if options.reduction == "mean" and options.mean_strategy == "post_and_loss":
        return options.loss_scale / options.replicas
    return options.loss_scale


def _scale_loss(options: Options) -> ScaleLoss:
    return ScaleLoss(
        options.has_variable_loss_scale,
        start_gradient(options) / options.loss_scale,
        options.automatic_loss_scaling,
    )


def _half_partials(options: Options) -> HalfPartials:
    return HalfPartials(
        options.partials_chunk,
        matmuls=options.partials == "half",
        convolutions=options.convolution_partials == "half",
    )


def _accumulation(options: Options) -> Accumulation:
    if options.gradient_accumulation == 1:
        return "store"
    running = options.reduction == "mean" and options.mean_strategy == "running"
    return "running" if running else "sum"
