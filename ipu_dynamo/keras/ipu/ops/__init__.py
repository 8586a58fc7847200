"""Offer `ipu.ops`, as far as Keras programs use it."""

from ipu_dynamo.keras.ipu.not_offered import not_offered
from ipu_dynamo.keras.ipu.ops import pipelining_ops as pipelining_ops

__getattr__ = not_offered("ipu.ops")
