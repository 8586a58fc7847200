"""Offer the names of `ipu.ipu_strategy`."""

from ipu_dynamo.keras.attach.strategy import IPUStrategy as IPUStrategy
from ipu_dynamo.keras.attach.strategy import IPUStrategyV1 as IPUStrategyV1
from ipu_dynamo.keras.ipu.not_offered import not_offered

__getattr__ = not_offered("ipu.ipu_strategy")
