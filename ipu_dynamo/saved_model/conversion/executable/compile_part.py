"""Compile a part of a program for the steps that a call runs.

Compiling here checks everything and decides the program. The code of a machine is made when the
file is loaded there.
"""

from dataclasses import dataclass, replace

import torch

from ipu_dynamo.errors import IpuError
from ipu_dynamo.options import Options, StageSpec, Strategy
from ipu_dynamo.passes.micro_batch.independent_rows import rows_of_results
from ipu_dynamo.saved_model.conversion.drafts.draft import Draft, Placement
from ipu_dynamo.saved_model.conversion.drafts.fixed_program import MicroBatch, fix_rows
from ipu_dynamo.saved_model.conversion.executable.compiled_part import (
    Border,
    CompiledPart,
    compiled_part,
)
from ipu_dynamo.saved_model.conversion.executable.part_module import PartModule, block_of_stage
from ipu_dynamo.whole_step.api import compile_inference
from ipu_dynamo.whole_step.compiled_model import CompiledModel

_PROOF_ROWS = 3  # one row looks like a size that spreads


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A part, compiled.

    Attributes:
        stacked: see `PartModule`.
        micro_batches: of a step.
    """

    part: CompiledPart
    model: CompiledModel
    stacked: bool
    micro_batches: int


def compile_part(
    draft: Draft, edges: Border, micro_batch: MicroBatch, options: Options, batch_per_step: int
) -> CompiledProgram:
    """Compile the nodes of IPUs.

    Args:
        edges: of the draft.
        options: of the core, without those that follow from the program.
        batch_per_step: micro-batches of a step, for each stage of a pipeline.

    Raises:
        ValueError: they cannot be compiled, or rows of results depend on other rows.
    """
    part = compiled_part(fix_rows(draft, micro_batch), edges)
    if micro_batch.symbol is not None:
        _check_rows(draft, edges, micro_batch, options)
    stages = max(1, len(part.placement.device_mapping))
    count = batch_per_step * stages
    stacked = micro_batch.symbol is None and count > 1
    options = replace(
        options,
        engine="eager",
        device_iterations=count,
        strategy=_strategy(part.placement),
    )
    return CompiledProgram(part, _compiled(part, options, count, stacked), stacked, count)


def _check_rows(draft: Draft, edges: Border, micro_batch: MicroBatch, options: Options) -> None:
    """Raise unless a row of each result depends on the same row of the inputs alone."""
    fixed = fix_rows(draft, MicroBatch(_PROOF_ROWS, micro_batch.symbol))
    part = compiled_part(replace(fixed, placement=_on_one_ipu(fixed.placement)), edges)
    model = _compiled(part, replace(options, engine="eager"), 1, False)
    try:
        rows_of_results(model.program)
    except IpuError as error:
        raise ValueError(
            "the program cannot run in micro-batches: a row of a result may depend on other rows "
            f"({_shown(error)}); export it with a fixed number of rows"
        ) from error


def _compiled(part: CompiledPart, options: Options, count: int, stacked: bool) -> CompiledModel:
    model = compile_inference(PartModule(part, stacked=stacked), options, own_weights=True)
    examples = []
    for value in part.inputs.values():
        shape = tuple(value.shape)
        if stacked:
            shape = (count, *shape)
        elif count > 1:
            shape = (count * shape[0], *shape[1:])
        examples.append(torch.zeros(shape, dtype=value.dtype))
    try:
        model.compile(*examples)
    except IpuError as error:
        raise ValueError(f"the executable cannot be compiled: {error}") from error
    return model


def _strategy(placement: Placement) -> Strategy:
    if not placement.stages:
        return Strategy(kind="sharded")
    stages = tuple(
        StageSpec((block_of_stage(stage),), ipu)
        for stage, ipu in enumerate(placement.device_mapping)
    )
    return Strategy(kind="pipelined", stages=stages, keep_stages=True)


def _on_one_ipu(placement: Placement) -> Placement:
    return replace(placement, ipus=dict.fromkeys(placement.ipus, 0), stages={}, device_mapping=())


def _shown(error: Exception) -> str:
    """The message of an error, and the lines about its node."""
    lines = str(error).splitlines()
    return " ".join(line.strip() for line in lines[:1] + [x for x in lines if "from: " in x])
