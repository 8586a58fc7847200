"""Hold a signature of a saved program as an object that is called with tensors by name."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.locks import QueueLock
from ipu_dynamo.saved_model.exported.flat_program import FlatProgram, Watch
from ipu_dynamo.saved_model.exported.node_names import Group, groups
from ipu_dynamo.saved_model.exported.program_interface import (
    tensor_inputs,
    tensor_outputs,
    user_inputs,
    user_output_nodes,
)
from ipu_dynamo.saved_model.exported.size_check import SizeCheck, least_sizes
from ipu_dynamo.saved_model.files.index import SignatureEntry
from ipu_dynamo.saved_model.files.tensor_spec import DTYPES, TensorSpec

_Result = TypeVar("_Result")


class Runner(Protocol):
    """Computes a program's flat results."""

    def run(self, inputs: Sequence[Any], watch: Watch | None = None) -> list[Any]:
        """All user outputs, by position; they share no memory with inputs or state.

        Args:
            inputs: all user inputs, by position; they are not changed.
            watch: called with each node and its value.
        """

    def close(self) -> None:
        """Free its memory."""


class Signature:
    """A program with named inputs and outputs.

    One call runs at a time; other threads wait in the order in which they came. Arguments are not
    changed, and results are new tensors. A call that raises leaves the object usable. The state has
    one copy, so a call takes a `QueueLock` and needs no `DualView`.

    Attributes:
        inputs: name to type and shape, as in the index.
        outputs: the same of results.
        method_name: as in the index, the kind of work that the program does.
        defaults: of one row, for inputs that may be left out.
        parameter_names: canonical names of parameters, where they are not the qualified ones.
        placement: where the nodes of a converted program run.

    Args:
        make_runner: makes what runs it, when it is called first. None: the host runs its graph.

    Raises:
        ValueError: the entry of the index does not fit the program.
    """

    def __init__(
        self,
        program: ExportedProgram,
        entry: SignatureEntry,
        what: str,
        *,
        defaults: Mapping[str, Tensor] | None = None,
        make_runner: "Callable[[Signature], Runner] | None" = None,
    ) -> None:
        self.defaults = dict(defaults or {})
        self.inputs: Mapping[str, TensorSpec] = dict(entry.inputs)
        self.outputs: Mapping[str, TensorSpec] = dict(entry.outputs)
        self.method_name = entry.method_name
        self.placement = entry.placement
        _compare(self.inputs, tensor_inputs(program), f"{what}: input")
        _compare(self.outputs, tensor_outputs(program), f"{what}: output")
        self.parameter_names = dict(entry.parameter_names)
        self._program: ExportedProgram | None = program
        self._sizes = SizeCheck(program, self.inputs)
        self._flat = [None if isinstance(v, Tensor) else v for _, v in user_inputs(program)]
        self._make_runner = make_runner or (lambda signature: FlatProgram(signature.program))
        self._runner: Runner | None = None
        self._lock = QueueLock()

    def __call__(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Compute the outputs.

        Args:
            tensors: all inputs, by name. Types that go into those of the signature are converted.

        Raises:
            ValueError: an input is missing or unknown, or has another shape.
            TypeError: an input has another type.
            RuntimeError: the object is closed.
        """
        return self._run(tensors, None)

    def watched(self, tensors: Mapping[str, Tensor], watch: Watch) -> dict[str, Tensor]:
        """Compute the outputs, and tell `watch` each node of the graph with its value."""
        return self._run(tensors, watch)

    def warm_up(self) -> None:
        """Do the preparations of the first call, and run once on zeros.

        A size that calls choose is 2, or the least that the program takes.
        """
        self._run({name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in self._least()})

    def close(self) -> None:
        """Wait for a running call, and free the memory. Later calls raise."""
        self._alone(self._close)

    def _close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._program = self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def program(self) -> ExportedProgram:
        """The program of this signature."""
        return self._open()

    def groups(self) -> list[Group]:
        """The nodes of the program by their canonical names, in the order of the graph."""
        program = self._open()
        by_position = {spec.position: name for name, spec in self.inputs.items()}
        names = {
            node: by_position[position]
            for position, (node, _) in enumerate(user_inputs(program))
            if position in by_position
        }
        return groups(program, names, self.parameter_names)

    def border_nodes(self) -> dict[tuple[str, str], str]:
        """The canonical names of the nodes of inputs and outputs, by `("input", name)`."""
        owners = {node.name: group.name for group in self.groups() for node in group.nodes}
        inputs, outputs = user_inputs(self._open()), user_output_nodes(self._open())
        return {
            **{("input", n): owners[inputs[s.position][0]] for n, s in self.inputs.items()},
            **{("output", n): owners[outputs[s.position]] for n, s in self.outputs.items()},
        }

    def _run(self, tensors: Mapping[str, Tensor], watch: Watch | None = None) -> dict[str, Tensor]:
        if not tensors.keys() <= self.inputs.keys():
            (unknown, *_) = [name for name in tensors if name not in self.inputs]
            valid = ", ".join(map(repr, self.inputs))
            raise ValueError(f"unknown input {unknown!r}; valid are {valid}")
        if self.defaults:
            tensors = self._with_defaults(tensors)
        return self._alone(partial(self._run_alone, tensors, watch))

    def _alone(self, action: Callable[[], _Result]) -> _Result:
        if self._lock.held_here():  # in what watches a call, or in a signal's handler
            raise RuntimeError("a signature cannot be called or closed within its own call")
        return self._lock.run(action)

    def _run_alone(self, tensors: Mapping[str, Tensor], watch: Watch | None) -> dict[str, Tensor]:
        self._open()
        flat: list[Any] = list(self._flat)
        for name, spec in self.inputs.items():
            if name not in tensors:
                raise ValueError(f"no value for input {name!r}")
            value = spec.fitted(name, tensors[name])
            flat[spec.position] = value.detach() if value.requires_grad else value
        self._sizes.check(flat)
        if self._runner is None:
            self._runner = self._make_runner(self)
        try:
            results = self._runner.run(flat, watch)
        except (IndexError, RuntimeError, ValueError) as error:
            if (node := self._failed_node(error)) and not isinstance(error, IpuError):
                error.args = (f"{error}, in node {node}", *error.args[1:])
            raise
        return {name: results[spec.position] for name, spec in self.outputs.items()}

    def _failed_node(self, error: Exception) -> str:
        """The node whose operator raised an error, and the inputs that it reads."""
        nodes = {node.name: node for node in self._open().graph.nodes}
        inputs = {
            node: name for (kind, name), node in self.border_nodes().items() if kind == "input"
        }
        owners = {node.name: group.name for group in self.groups() for node in group.nodes}
        for frame in traceback.extract_tb(error.__traceback__):
            if "eval_with_key" in frame.filename:  # the code of the graph, a line for each node
                node = nodes.get((frame.line or "").partition(" = ")[0].partition(":")[0].strip())
                if node is not None:
                    read = [owners.get(n.name, n.name) for n in node.all_input_nodes]
                    of = ", ".join(f"input {inputs[name]}" for name in read if name in inputs)
                    name = owners.get(node.name, node.name)
                    return f"{name}, {of}" if of else name
        return ""

    def _with_defaults(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """All inputs, as many rows of those that were left out as of the first that is there."""
        missing = [name for name in self.defaults if name not in tensors]
        if not missing or not tensors:
            return tensors
        rows = next(iter(tensors.values())).shape[:1]
        shapes = {name: self.defaults[name].shape for name in missing}
        return {
            **tensors,
            **{name: self.defaults[name].expand(*rows, *shapes[name]) for name in missing},
        }

    def _open(self) -> ExportedProgram:
        if self._program is None:
            raise RuntimeError("the signature is closed")
        return self._program

    def _least(self) -> list[tuple[str, list[int], torch.dtype]]:
        program = self._open()
        values = [value for _, value in user_inputs(program)]
        return [
            (name, least_sizes(program, values[spec.position]), DTYPES[spec.dtype])
            for name, spec in self.inputs.items()
        ]


def _compare(named: Mapping[str, TensorSpec], real: Mapping[int, TensorSpec], what: str) -> None:
    """Raise ValueError where an index does not say what a program has."""
    positions: dict[int, str] = {}
    for name, spec in named.items():
        expected = real.get(spec.position)
        if expected is None or spec.position in positions:
            raise ValueError(f"{what} {name!r} has position {spec.position}, which does not fit")
        if spec != expected:
            raise ValueError(
                f"{what} {name!r} is {spec} in the index, and {expected} in the program"
            )
        positions[spec.position] = name
    if missing := sorted(real.keys() - positions.keys()):
        raise ValueError(f"{what}: position {missing[0]} has no name in the index")
