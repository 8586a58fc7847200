"""Run Keras models on virtual IPUs: strategies, extended models, pipeline stages.

A client of the core, which does not know it. Keras is imported here, on its torch backend, and never
by `import ipu_dynamo`.
"""

import os
import sys

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "torch")

from ipu_dynamo.keras.attach.strategy import IPUStrategy as IPUStrategy
from ipu_dynamo.keras.attach.strategy import IPUStrategyV1 as IPUStrategyV1
from ipu_dynamo.keras.attach.strategy import current_strategy as current_strategy
from ipu_dynamo.keras.settings.enumerations import (
    GradientAccumulationReductionMethod as GradientAccumulationReductionMethod,
)
from ipu_dynamo.keras.settings.enumerations import PipelineSchedule as PipelineSchedule
from ipu_dynamo.keras.settings.enumerations import RecomputationMode as RecomputationMode
from ipu_dynamo.keras.settings.enumerations import (
    ReplicatedMetricReductionMethod as ReplicatedMetricReductionMethod,
)
