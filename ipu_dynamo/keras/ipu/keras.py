"""Say what to write in place of the models of `ipu.keras`, which Keras' own classes replace."""

from ipu_dynamo.keras.ipu.not_offered import not_offered

__getattr__ = not_offered("ipu.keras")
