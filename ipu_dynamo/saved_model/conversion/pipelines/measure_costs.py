"""Time the nodes of a program on this computer, in place of cycles.

A node that was not timed costs what one with the same operators and shapes costs, else the mean.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.progress import begin
from ipu_dynamo.saved_model.conversion.drafts.fixed_program import FixedProgram
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup, name_of
from ipu_dynamo.saved_model.exported.node_names import is_result_of_tuple, operator_name

REPETITIONS = 5
"""Of a program; the least time of each node counts, as others disturb and nothing speeds up."""


def measure_seconds(program: FixedProgram, groups: Sequence[NodeGroup]) -> dict[str, float]:
    """The seconds of each group, on zeros for inputs."""
    begin("measuring")
    placeholders = list(program.graph.find_nodes(op="placeholder"))
    timer = _Timer(program)
    with torch.no_grad():
        values = [
            program.tensors[node]
            if node in program.tensors
            else torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
            for node in placeholders
        ]
        for _ in range(REPETITIONS):
            timer.run(*values)
    return filled({group.name: timer.seconds.get(group.name) for group in groups}, groups)


def filled(seconds: Mapping[str, float | None], groups: Sequence[NodeGroup]) -> dict[str, float]:
    """Seconds for every group, also those that were not timed."""
    timed = {name: value for name, value in seconds.items() if value is not None}
    mean = sum(timed.values()) / len(timed) if timed else 0.0
    alike = {_form(group): timed[group.name] for group in reversed(groups) if group.name in timed}
    return {group.name: timed.get(group.name, alike.get(_form(group), mean)) for group in groups}


def _form(group: NodeGroup) -> tuple[Any, ...]:
    """Operators and shapes of a group."""
    reads = [n.meta["val"] for node in group.nodes for n in node.all_input_nodes]
    shapes = [tuple(value.shape) for value in reads if isinstance(value, Tensor)]
    calls = [operator_name(node) for node in group.nodes if not is_result_of_tuple(node)]
    return (*calls, *shapes)


class _Timer(fx.Interpreter):
    """Runs operator by operator, and keeps the least seconds of each group."""

    def __init__(self, program: FixedProgram) -> None:
        super().__init__(module_of(program.graph))
        self._run: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._run = {}
        result = super().run(*args, **kwargs)
        for name, seconds in self._run.items():
            self.seconds[name] = min(seconds, self.seconds.get(name, seconds))
        return result

    def run_node(self, n: fx.Node) -> Any:
        start = perf_counter()
        value = super().run_node(n)
        if n.op == "call_function":
            self._run[name_of(n)] = self._run.get(name_of(n), 0.0) + perf_counter() - start
        return value
