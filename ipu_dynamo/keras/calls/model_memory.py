"""Keep state that a model's programs share, other than its variables, while it lives."""

from typing import Any

import keras
import torch

from ipu_dynamo.keras.private.stateless_names import draw_seed
from ipu_dynamo.keras.step.replica_memory import ReplicaMemory

_MEMORY = "_ipu_dynamo_memory"  # in the instance's __dict__, past Keras' and PyTorch's tracking


class ModelMemory:
    """The replicas' own values of variables, and generators for draws without a seed.

    Attributes:
        outside: by identity, the variables that a step uses and the model does not have.
        read_by_update: the same of an update, such as those that a schedule or a constraint reads.
        assigned: by identity, the trained variables that a step has been seen to assign.
        generators: seed generators by stage, each made when a program needs it. No file holds them.
            Each stage has one, since its state lives where it draws.
    """

    def __init__(self) -> None:
        self.assigned: dict[int, Any] = {}
        self.generators: dict[int, Any] = {}
        self.outside: dict[int, Any] = {}
        self.read_by_update: dict[int, Any] = {}
        self._replicas: dict[int, ReplicaMemory] = {}

    @property
    def step_variables(self) -> list[Any]:
        """Variables of a step that the model does not have."""
        seeds = [generator.state for generator in self.generators.values()]
        return [*seeds, *self.outside.values()]

    def make_generator(self, stage: int) -> None:
        """Make the generator of a stage, its words drawn from Keras' global one."""
        with torch.no_grad():
            words = draw_seed(None)
            generator = keras.random.SeedGenerator(0, name=f"unseeded{stage}")
            generator.state.assign(words)
        self.generators[stage] = generator

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
