"""Give nodes the stages that expressions name."""

import re
from collections.abc import Sequence

from ipu_dynamo.saved_model.conversion.settings.pipeline_config import PipelineConfig, Solution


def manual_stages(config: PipelineConfig, nodes: Sequence[str], num_ipus: int) -> Solution:
    """The stage of each node: the last whose expressions match the begin of its name, else 0.

    Raises:
        ValueError: `device_info` names an IPU that there is not.
    """
    for stage, ipu in enumerate(config.device_info):
        if ipu >= num_ipus:
            raise ValueError(
                f"pipeline_cfg: device_info puts stage {stage} on IPU {ipu}, and num_ipus is "
                f"{num_ipus}"
            )
    compiled = [[re.compile(e) for e in listed] for listed in config.manual_pipeline_config]
    return Solution(
        {
            name: max(
                (k for k, listed in enumerate(compiled) if any(e.match(name) for e in listed)),
                default=0,
            )
            for name in nodes
        },
        config.device_info,
    )
