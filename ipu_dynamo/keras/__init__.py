"""Run Keras models on virtual IPUs: strategies, extended models, pipeline stages.

A client of the core, which does not know it. Importing this imports Keras, on its torch backend;
`import ipu_dynamo` does not.
"""

# first: it says what is wrong where Keras cannot be used
from ipu_dynamo.keras import check_keras as check_keras
from ipu_dynamo.keras import extensions as extensions
from ipu_dynamo.keras import ipu as ipu
from ipu_dynamo.keras.attach.extended_classes import extend as extend
from ipu_dynamo.keras.attach.strategy import IPUStrategy as IPUStrategy
from ipu_dynamo.keras.attach.strategy import IPUStrategyV1 as IPUStrategyV1
from ipu_dynamo.keras.attach.strategy import current_strategy as current_strategy
from ipu_dynamo.keras.old_names import name_in_keras
from ipu_dynamo.keras.settings.enumerations import (
    GradientAccumulationReductionMethod as GradientAccumulationReductionMethod,
)
from ipu_dynamo.keras.settings.enumerations import PipelineSchedule as PipelineSchedule
from ipu_dynamo.keras.settings.enumerations import RecomputationMode as RecomputationMode
from ipu_dynamo.keras.settings.enumerations import (
    ReplicatedMetricReductionMethod as ReplicatedMetricReductionMethod,
)
from ipu_dynamo.keras.stages.assignments import (
    FunctionalLayerPipelineStageAssignment as FunctionalLayerPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.assignments import (
    FunctionalNestedModelPipelineStageAssignment as FunctionalNestedModelPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.assignments import (
    ModelLayerPipelineStageAssignment as ModelLayerPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.assignments import (
    NestedModelPipelineStageAssignment as NestedModelPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.assignments import (
    SequentialLayerPipelineStageAssignment as SequentialLayerPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.assignments import (
    SequentialNestedModelPipelineStageAssignment as SequentialNestedModelPipelineStageAssignment,
)
from ipu_dynamo.keras.stages.pipeline_stage import PipelineStage as PipelineStage

name_in_keras()
