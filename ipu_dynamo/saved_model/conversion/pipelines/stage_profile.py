"""Write the costs and the memory of a pipeline's stages, as `profile.json`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipu_dynamo.saved_model.conversion.pipelines.cost_constants import CYCLES_PER_SECOND
from ipu_dynamo.saved_model.conversion.pipelines.work_list import (
    IpuMemory,
    WorkNode,
    memory_of_ipus,
)
from ipu_dynamo.saved_model.conversion.settings.pipeline_config import Solution

FILE = "profile.json"


@dataclass(frozen=True, slots=True)
class StageProfile:
    """Costs and bytes of a pipeline.

    Attributes:
        measured: costs are seconds, else cycles.
        rows: of a step: its micro-batches times their rows.
        micro_batches: of a step.
    """

    nodes: Sequence[WorkNode]
    solution: Solution
    num_ipus: int
    memory_per_ipu: int
    measured: bool
    micro_batches: int
    rows: int

    def memory(self) -> list[IpuMemory]:
        """The bytes of every IPU."""
        return memory_of_ipus(
            self.nodes,
            self.solution.pipeline_mapping,
            self.solution.device_mapping,
            self.num_ipus,
            self.memory_per_ipu,
        )

    def step_cost(self) -> float:
        """The cost of a step: that of the slowest stage times the number of pipeline cycles."""
        stages: list[float] = [0] * len(self.solution.device_mapping)
        for node in self.nodes:
            stages[self.solution.pipeline_mapping[node.name]] += self._cost(node)
        return (self.micro_batches + len(stages) - 1) * max(stages)

    def write(self) -> bytes:
        """The content of the file."""
        cost = self.step_cost()
        seconds = cost if self.measured else cost / CYCLES_PER_SECOND
        value: dict[str, Any] = {
            "source": "measured" if self.measured else "estimate",
            "cost_unit": "seconds" if self.measured else "cycles",
            "num_ipus": self.num_ipus,
            "device_mapping": list(self.solution.device_mapping),
            "nodes": {
                node.name: {
                    "stage": self.solution.pipeline_mapping[node.name],
                    "cost": self._cost(node),
                    "always_live_bytes": node.always_live_bytes,
                    "transient_bytes": node.transient_bytes,
                }
                for node in self.nodes
            },
            "ipus": [
                {"used": ipu.used, "free": ipu.free, "overflow": ipu.overflow}
                for ipu in self.memory()
            ],
            "step": {"cost": cost, "samples_per_second": self.rows / seconds if seconds else 0.0},
        }
        return f"{json.dumps(value, indent=1, allow_nan=False)}\n".encode()

    def _cost(self, node: WorkNode) -> float:
        return node.cycles if node.seconds is None else node.seconds
