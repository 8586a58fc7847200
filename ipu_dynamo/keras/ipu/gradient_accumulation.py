"""Offer the names of `ipu.gradient_accumulation` that Keras programs use."""

from ipu_dynamo.keras.ipu.not_offered import not_offered
from ipu_dynamo.keras.settings.enumerations import (
    GradientAccumulationReductionMethod as GradientAccumulationReductionMethod,
)

__getattr__ = not_offered("ipu.gradient_accumulation")
