"""Run inference whose pipeline cannot be filled stage by stage, if its strategy permits that."""

import logging
from dataclasses import replace

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.options import Options
from ipu_dynamo.passes.traced.stages.placement import pipeline_stages

log = logging.getLogger(__name__)


def sharded_if_short(capture: Traced, options: Options) -> Options:
    """`options`, sharded where the strategy permits it and device iterations are too few.

    Args:
        capture: fresh from tracing; left as it is.
    """
    strategy, iterations = options.strategy, options.device_iterations
    if capture.training or not strategy.sharded_if_short:
        return options
    stages = pipeline_stages(capture.graph.graph, strategy)
    if iterations >= stages:
        return options
    log.warning(
        "a pipeline of %d stages cannot be filled with device_iterations=%d: the stages run one "
        "after the other (sharded), with the same results; inference_device_iterations=%d of an "
        "IPUConfig, or device_iterations=%d of options, makes a pipeline",
        stages,
        iterations,
        stages,
        stages,
    )
    changed = replace(strategy, kind="sharded", schedule="grouped", sharded_if_short=False)
    return replace(options, strategy=changed)
