"""Check that stages follow the data, are not empty, and share no parameter between IPUs."""

from collections.abc import Mapping

from ipu_dynamo.saved_model.conversion.drafts.fixed_program import FixedProgram
from ipu_dynamo.saved_model.conversion.pipelines.nodes_of_stages import (
    parameter_readers,
    stage_nodes,
    with_casts,
)
from ipu_dynamo.saved_model.conversion.settings.pipeline_config import Solution


def check_stages(program: FixedProgram, solution: Solution, what: str) -> None:
    """Raise where stages cannot be those of a pipeline.

    Args:
        what: where they stand, for errors.

    Raises:
        ValueError: it names nodes and stages.
    """
    _check_used(solution, what)
    stages = with_casts(program, solution.pipeline_mapping)
    _check_order(program, stages, what)
    for parameter, readers in parameter_readers(program, stages).items():
        ipus = {reader: solution.device_mapping[stages[reader]] for reader in readers}
        if len(set(ipus.values())) > 1:
            shown = ", ".join(f"{n!r} (IPU {ipu})" for n, ipu in list(ipus.items())[:5])
            raise ValueError(
                f"{what}: parameter {parameter!r} is read on several IPUs, by {shown}; put what "
                "shares it into stages of one IPU"
            )


def _check_used(solution: Solution, what: str) -> None:
    used = set(solution.pipeline_mapping.values())
    for stage in range(len(solution.device_mapping)):
        if stage not in used:
            raise ValueError(f"{what}: stage {stage} has no nodes")


def _check_order(program: FixedProgram, stages: Mapping[str, int], what: str) -> None:
    nodes = stage_nodes(program)
    wrong = [
        (group.name, read)
        for group in (*nodes.groups, *nodes.casts)
        for read in group.reads
        if stages.get(read, -1) > stages[group.name]
    ]
    if wrong:
        shown = ", ".join(
            f"{name!r} (stage {stages[name]}) reads {read!r} (stage {stages[read]})"
            for name, read in wrong[:5]
        )
        raise ValueError(f"{what}: stages do not follow the data: {shown}")
