"""Bring the host's rows to micro-batches block by block, and join their results.

Before   input %x: f32[2,8] and output %y: f32[2,4] of a loop over 4 micro-batches
After    %x is the m-th block of rows of f32[8,8]; the blocks of %y follow each other, or are added
Keeps    functions and instructions.
Source   PopTorch user guide, "poptorch.PipelinedExecution".
"""

from collections.abc import Mapping
from dataclasses import field, replace

from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.micro_batch.placements import Joining, Shard
from ipu_dynamo.program import Program


class StreamRows(Pass):
    """The pass.

    Args:
        slices: the blocks of each input, by name.
        joins: how the values of each output become one, and its blocks.
    """

    level = "program"
    needed = "each micro-batch would read the first rows"

    slices: Mapping[str, Shard] = field(default_factory=dict)
    joins: tuple[tuple[Joining, Shard], ...] = ()

    def __call__(self, program: Program) -> Program:
        blocks = {stream.name: self.slices[stream.name] for stream in program.inputs}
        return replace(
            program,
            inputs=tuple(
                replace(stream, dim=blocks[stream.name].dim, outer=blocks[stream.name].outer)
                for stream in program.inputs
            ),
            outputs=tuple(
                replace(
                    stream,
                    dim=rows.dim,
                    outer=rows.outer,
                    returns="sum" if how == "sum" else "all",
                )
                for stream, (how, rows) in zip(program.outputs, self.joins, strict=True)
            ),
        )
