"""Call an executable without the graph around it, where that is nothing but the call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ipu_dynamo.ops.library.run_executable import check_results, run_executable
from ipu_dynamo.saved_model.exported.flat_program import without_shared_memory
from ipu_dynamo.saved_model.exported.node_names import is_result_of_tuple

_MOST_SHAPES = 1024


class DirectCall:
    """A call of the executable in place of a graph that consists of this call.

    Invariant: for shapes in `_checked` the results had the types that the program says.

    Args:
        inputs: the position of each argument among the flat user inputs.
        results: which result of the call each user output is.
        layouts: of the results of the call.
    """

    def __init__(
        self, inputs: Sequence[int], results: Sequence[int], layouts: Sequence[str]
    ) -> None:
        self._inputs, self._results, self._layouts = inputs, results, layouts
        self._checked: set[tuple[torch.Size, ...]] = set()

    def run(
        self, call: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[Any]
    ) -> list[Any]:
        """All user outputs, which share no memory with the inputs.

        Args:
            call: runs the executable.
            inputs: all user inputs, by position.
        """
        arguments = [inputs[position] for position in self._inputs]
        values = call(arguments)
        shapes = tuple([value.shape for value in arguments])
        if shapes not in self._checked:
            check_results(arguments, self._layouts, values)
            if len(self._checked) < _MOST_SHAPES:
                self._checked.add(shapes)
        return without_shared_memory([values[index] for index in self._results], arguments)


def direct_call(program: ExportedProgram) -> DirectCall | None:
    """The call that a program consists of; None if it computes anything else."""
    signature = program.graph_signature
    user_inputs = [s.arg.name for s in signature.input_specs if s.kind == InputKind.USER_INPUT]
    outputs = [s for s in signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
    nodes = {node.name: node for node in program.graph.nodes}
    calls = [node for node in nodes.values() if node.op == "call_function"]
    targets = [node for node in calls if node.target is run_executable]
    if len(targets) != 1 or len(outputs) != len(signature.output_specs):
        return None
    (call,) = targets
    if not all(node is call or is_result_of_tuple(node) for node in calls):
        return None
    arguments, _, layouts = call.args
    positions = [user_inputs.index(a.name) for a in arguments if a.name in user_inputs]
    results = [nodes[spec.arg.name] for spec in outputs]
    if len(positions) != len(arguments) or not all(map(is_result_of_tuple, results)):
        return None
    return DirectCall(positions, [int(node.args[1]) for node in results], list(layouts))
