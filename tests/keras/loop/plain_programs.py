"""Run executions by plain Keras, batch by batch, in the place of compiled programs.

The loop's own tests need no compiler: whatever is about steps, data, callbacks and threads is the
same. Replicas share one model here, so only the order of their batches can be looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.calls.programs import CallShape
from ipu_dynamo.keras.loop import execution, on_batch, prepare


@dataclass
class PlainProgram:
    """A `StepProgram` whose steps are those of plain Keras."""

    model: Any
    kind: str
    shape: CallShape
    before_step: Callable[[int], None]

    def run(self, batches: Sequence[Any], on_step: Any = None) -> list[list[Any]]:
        replicas = self.shape.replicas
        assert len(batches) == self.shape.steps * replicas
        steps = []
        for step in range(self.shape.steps):
            self.before_step(step)
            rows = batches[step * replicas : (step + 1) * replicas]
            steps.append([self._on_batch(batch) for batch in rows])
            if on_step is not None:
                on_step(step, steps[-1])
        return steps

    def _on_batch(self, batch: Any) -> Any:
        match self.kind:
            case "fit":
                logs = self.model.train_step(batch)
                return {name: value.clone() for name, value in logs.items()}
            case "evaluate":
                with torch.no_grad():
                    return dict(self.model.test_step(batch))
            case _:
                with torch.no_grad():
                    return self.model.predict_step(batch)


@dataclass
class PlainMachine:
    """Where the loop asks for programs: a machine of some replicas, and what it was asked for.

    Args:
        before_step: is called with the number of each step in its execution, before it runs.
    """

    replicas: int = 1
    pipelined: bool = False
    micro_batches: int = 1
    before_step: Callable[[int], None] = lambda step: None
    shapes: list[tuple[str, CallShape]] = field(default_factory=list)
    first_batches: list[Any] = field(default_factory=list)

    def replica_count(self, model: Any) -> int:
        return self.replicas

    def micro_batches_needed(self, model: Any, kind: str) -> int:
        return self.micro_batches

    def call_shape(self, model: Any, kind: str, steps: int) -> CallShape:
        accumulation = (state_of(model).settings.accumulation_steps or 1) if kind == "fit" else 1
        return CallShape(steps, accumulation, self.replicas, self.pipelined)

    def program_for(self, model: Any, kind: str, batch: Any, shape: CallShape) -> PlainProgram:
        self.shapes.append((kind, shape))
        self.first_batches.append(batch)
        return PlainProgram(model, kind, shape, self.before_step)

    def install(self, monkeypatch: Any) -> None:
        for module in (execution, prepare, on_batch):
            for name in ("replica_count", "call_shape", "program_for", "micro_batches_needed"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(self, name))
