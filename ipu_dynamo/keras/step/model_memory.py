"""Keep what a model's programs share beside its variables, for as long as the model lives."""

from typing import Any

import keras
import torch

from ipu_dynamo.keras.private.stateless_names import draw_seed
from ipu_dynamo.keras.step.replica_memory import ReplicaMemory

_MEMORY = "_ipu_dynamo_memory"  # in the instance's __dict__, past Keras' and PyTorch's tracking


class ModelMemory:
    """What replicas have for themselves, and the generator of draws that name none.

    Attributes:
        generator: a `keras.random.SeedGenerator`; None until a program needs it. No file holds it.
    """

    def __init__(self) -> None:
        self.generator: Any = None
        self._replicas: dict[int, ReplicaMemory] = {}

    @property
    def seeds(self) -> list[Any]:
        """States of generators that are no variables of the model."""
        return [] if self.generator is None else [self.generator.state]

    def make_generator(self) -> None:
        """Make the generator, its words drawn from Keras' global one."""
        with torch.no_grad():
            words = draw_seed(None)
            self.generator = keras.random.SeedGenerator(0, name="unseeded")
            self.generator.state.assign(words)

    def replicas(self, count: int) -> ReplicaMemory:
        """The memory of so many replicas."""
        return self._replicas.setdefault(count, ReplicaMemory(count))


def memory_of(model: Any) -> ModelMemory:
    """The memory of a model."""
    memory = vars(model).get(_MEMORY)
    if memory is None:
        memory = vars(model)[_MEMORY] = ModelMemory()
    assert isinstance(memory, ModelMemory)
    return memory
