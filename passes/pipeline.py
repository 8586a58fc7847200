"""Hold the order of the passes, on one page, and run them."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ipu_dynamo.capture.capture import Capture, Pass
from ipu_dynamo.devices import devices_of_ipus
from ipu_dynamo.errors import CompileError
from ipu_dynamo.options import OptionError, Options
from ipu_dynamo.passes.carry_stages import read_stages
from ipu_dynamo.passes.differentiate import Differentiate
from ipu_dynamo.passes.emit import UpdateGroup, emit
from ipu_dynamo.passes.float_products import float_products
from ipu_dynamo.passes.floating_point_exceptions import FloatingPointExceptions
from ipu_dynamo.passes.half_partials import HalfPartials
from ipu_dynamo.passes.identity_loss import IdentityLoss
from ipu_dynamo.passes.partition import Accumulation, Partition
from ipu_dynamo.passes.place_gradients import place_gradients
from ipu_dynamo.passes.placement import Placement
from ipu_dynamo.passes.precision import Precision
from ipu_dynamo.passes.random_streams import random_streams
from ipu_dynamo.passes.retarget import retarget
from ipu_dynamo.passes.round_scalars import round_scalars
from ipu_dynamo.passes.stochastic_rounding import StochasticRounding
from ipu_dynamo.program import Program

log = logging.getLogger(__name__)
DUMP = "IPU_DYNAMO_DUMP"  # environment variable: a folder for the graph after each pass


def pipeline(options: Options, *, training: bool, loss: int | None = None) -> tuple[Pass, ...]:
    """The passes from a traced model to a placed, differentiated graph, in order.

    `partition` and `emit`, which turn that graph into a program, follow in `lower`.
    """
    accumulation, iterations = options.gradient_accumulation, options.device_iterations
    return (
        Placement(options.strategy, accumulation if training else iterations),
        IdentityLoss(loss),
        Precision(options.narrow),
        Differentiate(_start_gradient(options)),
        round_scalars,
        random_streams,
        place_gradients,
        _half_partials(options),
        float_products,
        StochasticRounding(options.stochastic_rounding),
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
    return (
        read_stages,
        round_scalars,
        place_gradients,
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
    devices: Sequence[torch.device] = (),
) -> Program:
    """Run `passes`, cut the graph into stages, and write the program.

    Args:
        devices: one for all IPUs, or one for each; none: the graph is left on its device.

    Raises:
        CompileError: from the pass that finds the fault; a note names it.
    """
    dump = _Dump(os.environ.get(DUMP), capture.alone)
    dump.write("traced", str(capture.graph.graph))
    for one in passes:
        name = getattr(one, "__name__", repr(one))
        try:
            changed = one(capture)
        except CompileError as error:
            error.add_note(f"in pass {name}")
            raise
        if changed:
            capture.check()
        log.debug("%s: %s", name, "changed the graph" if changed else "nothing to do")
        dump.write(name.partition("(")[0], str(capture.graph.graph))
    partitioned = Partition(_accumulation(options))(capture)
    of_ipus = devices_of_ipus(devices, max(capture.ipus.values()) + 1) if devices else ()
    for part in partitioned.parts if of_ipus else ():
        retarget(part.graph.graph, of_ipus[part.ipu])
        part.graph.recompile()
    program = emit(capture, partitioned, options, groups)
    dump.write("program", str(program))
    return program


class _Dump:
    """Write numbered files to a folder, or to `part` inside it; nothing without a folder."""

    def __init__(self, folder: str | None, part: str | None) -> None:
        self.folder = Path(folder, part or "") if folder else None
        self.count = 0
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, text: str) -> None:
        if self.folder is not None:
            (self.folder / f"{self.count:02}_{name.lower()}.txt").write_text(text + "\n")
            self.count += 1


def _start_gradient(options: Options) -> float:
    if options.reduction == "mean" and options.mean_strategy == "post_and_loss":
        return options.loss_scale / options.replicas
    return options.loss_scale


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
