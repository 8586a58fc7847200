"""Offer the names of `ipu.ops.pipelining_ops` that Keras programs use."""

from ipu_dynamo.keras.ipu.not_offered import not_offered
from ipu_dynamo.keras.settings.enumerations import PipelineSchedule as PipelineSchedule
from ipu_dynamo.keras.settings.enumerations import RecomputationMode as RecomputationMode

__getattr__ = not_offered("ipu.ops.pipelining_ops")
