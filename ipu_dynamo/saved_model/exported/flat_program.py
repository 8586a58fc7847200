"""Run an exported program on flat inputs, with the state that it holds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ipu_dynamo.ops.graph_queries import writes

Watch = Callable[[fx.Node, Any], None]


class FlatProgram:
    """The graph of a program, with its parameters and buffers.

    Args:
        program: its writes to buffers last from call to call.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self._module = program.graph_module
        signature = program.graph_signature
        held = {**program.constants, **dict(program.state_dict)}
        self._state: dict[str, Tensor] = {
            name: value.detach() for name, value in held.items() if isinstance(value, Tensor)
        }
        self._changes_inputs = any(writes(node) for node in program.graph.nodes)
        self._arguments = [
            None if spec.kind == InputKind.USER_INPUT else spec.target
            for spec in signature.input_specs
        ]
        self._results = [(spec.kind, spec.target) for spec in signature.output_specs]

    def run(self, inputs: Sequence[Any], watch: Watch | None = None) -> list[Any]:
        """Compute the user outputs, which share no memory with the state or the inputs.

        Args:
            inputs: all user inputs, by position; they are not changed.
            watch: called with each node and its value.
        """
        left = iter(_own(inputs) if self._changes_inputs else inputs)
        flat = [next(left) if name is None else self._state[name] for name in self._arguments]
        with torch.no_grad():
            if watch is None:
                values = self._module(*flat)
            else:
                values = _Watched(self._module, watch).run(*flat)
            outputs = []
            for (kind, target), value in zip(self._results, values, strict=True):
                if kind == OutputKind.BUFFER_MUTATION:
                    self._state[str(target)].copy_(value)
                elif kind == OutputKind.USER_OUTPUT:
                    outputs.append(value)
        return without_shared_memory(outputs, [*flat, *inputs])

    def close(self) -> None:
        """Free the state."""
        self._state.clear()


def without_shared_memory(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The values, copied where they share memory with one of the others."""
    storages = {_storage(value) for value in others if isinstance(value, Tensor)}
    return [
        value.clone() if isinstance(value, Tensor) and _storage(value) in storages else value
        for value in values
    ]


class _Watched(fx.Interpreter):
    """Runs node by node, and calls `watch` for each."""

    def __init__(self, module: fx.GraphModule, watch: Watch) -> None:
        super().__init__(module)
        self._watch = watch

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self._watch(n, value)
        return value


def _own(inputs: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in inputs]


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
