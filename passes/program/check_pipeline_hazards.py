"""Refuse pipelines in which a change of a buffer would come too late for the next micro-batch.

Before   parts in the order in which a micro-batch runs them
After    the same, or a CompileError
Keeps    the parts.
Source   PopTorch user guide, "poptorch.PipelinedExecution": stages work on different micro-batches
         at once; results are those of one micro-batch after the other.
"""

from ipu_dynamo.errors import CompileError
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Partitioned


class CheckPipelineHazards(Pass):
    """The pass, where micro-batches overlap."""

    level = "parts"
    needed = "a stage would read what another micro-batch has changed"

    def __call__(self, partitioned: Partitioned) -> bool:
        capture = partitioned.capture
        if len(set(capture.ipus.values())) > 1 and not capture.alone:
            refuse_stale_reads(partitioned)
        return False


def refuse_stale_reads(partitioned: Partitioned) -> None:
    """Raise when one stage reads a variable that another stage changes."""
    for part in partitioned.parts:
        for name in (write.target for write in part.writes if write.rule == "buffer"):
            for other in partitioned.parts:
                together = (other.stage, other.direction) == (part.stage, part.direction)
                if not together and name in other.inputs:
                    raise CompileError(
                        f"buffer {name} changes in stage {part.stage} on IPU {part.ipu} and is "
                        f"read in stage {other.stage} on IPU {other.ipu}, which works on another "
                        f"micro-batch then",
                        hint="put what reads and writes it into one stage, or use the sharded "
                        "strategy",
                        id="pipeline",
                    )
