"""Offer the names of `ipu.utils` that Keras programs use; `ipu.config` has the same."""

from ipu_dynamo.keras.ipu.config import configure_ipu_system as configure_ipu_system
from ipu_dynamo.keras.ipu.config import get_ipu_config as get_ipu_config
from ipu_dynamo.keras.ipu.config_choices import DeviceConnectionType as DeviceConnectionType
from ipu_dynamo.keras.ipu.config_choices import ExecutionProfileType as ExecutionProfileType
from ipu_dynamo.keras.ipu.config_choices import (
    MergeRemoteBuffersBehaviour as MergeRemoteBuffersBehaviour,
)
from ipu_dynamo.keras.ipu.config_choices import SchedulingAlgorithm as SchedulingAlgorithm
from ipu_dynamo.keras.ipu.config_choices import SelectionOrder as SelectionOrder
from ipu_dynamo.keras.ipu.config_choices import (
    StochasticRoundingBehaviour as StochasticRoundingBehaviour,
)
from ipu_dynamo.keras.ipu.not_offered import not_offered

__getattr__ = not_offered("ipu.utils")
