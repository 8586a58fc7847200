"""Offer optimizers that a training model runs on the device; each also works on the host."""

from poptorch.optim.adam import Adam, AdamW
from poptorch.optim.base import DeviceState, Optimizer
from poptorch.optim.lamb import LAMB
from poptorch.optim.reading import GroupReading, Reading, read_optimizer
from poptorch.optim.rmsprop import RMSprop
from poptorch.optim.sgd import SGD
from poptorch.optim.variable import VariableAttributes

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "DeviceState",
    "GroupReading",
    "Optimizer",
    "RMSprop",
    "Reading",
    "VariableAttributes",
    "read_optimizer",
]
