"""Offer TensorFlow's namespace `ipu`, as far as Keras programs use it.

Old programs change the line that imports it. Other names raise an error that says so.
"""

from ipu_dynamo.keras.ipu import config as config
from ipu_dynamo.keras.ipu import gradient_accumulation as gradient_accumulation
from ipu_dynamo.keras.ipu import ipu_strategy as ipu_strategy
from ipu_dynamo.keras.ipu import keras as keras
from ipu_dynamo.keras.ipu import ops as ops
from ipu_dynamo.keras.ipu import serving as serving
from ipu_dynamo.keras.ipu import utils as utils
from ipu_dynamo.keras.ipu.not_offered import not_offered
from ipu_dynamo.keras.ipu.ops import pipelining_ops as pipelining_ops

__getattr__ = not_offered("ipu")
