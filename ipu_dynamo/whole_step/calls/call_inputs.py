"""Make the inputs of a program's streams from the tensors of a call."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from ipu_dynamo.capture.trace import Arguments
from ipu_dynamo.errors import InputError
from ipu_dynamo.ops.precision.narrowing import narrowed, tell_of_lost_values
from ipu_dynamo.options import Options
from ipu_dynamo.program import Program
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.runtime.execute.host_io.batching import micro_batch_size
from ipu_dynamo.whole_step.calls.synthetic_data import synthetic_inputs


class CallInputs:
    """The inputs of every call of one program.

    Args:
        names: of the streams, in the order of the tensors of a call.
        warned: inputs with a warning already that numbers are lost; calls add theirs.
    """

    def __init__(
        self, program: Program, names: Sequence[str], options: Options, warned: set[str]
    ) -> None:
        self.warned = warned
        self._program, self._names, self._options = program, names, options
        self._changed = [output.name for output in program.outputs if output.mutates]
        self._synthetic: dict[str, Tensor] | None = None  # the same in every call

    def of(self, tensors: Sequence[Tensor], executable: Executable) -> Mapping[str, Tensor]:
        """The tensor that each stream reads in a call with these tensors.

        Raises:
            InputError: an input that the model changes in place shares memory with another one.
        """
        if self._options.synthetic_data:
            if self._synthetic is None:
                device = tensors[0].device if tensors else executable.devices[0]
                self._synthetic = synthetic_inputs(self._program, executable.batching, device)
            return self._synthetic
        pairs = zip(self._names, tensors, strict=True)
        inputs = {name: self._carried(name, tensor) for name, tensor in pairs}
        if self._changed:
            _refuse_shared(self._names, tensors, self._changed)
        return inputs

    def give_back(self, tensors: Sequence[Tensor], results: Mapping[str, Tensor]) -> None:
        """Copy the values of inputs that the model has changed into the tensors of the call."""
        for name in self._changed:
            tensors[self._names.index(name)].copy_(results[name])

    def _carried(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor that a stream reads: contiguous, without gradient, narrowed if wanted."""
        tensor = tensor.detach().contiguous()
        if not self._options.narrow:
            return tensor
        carried = narrowed(tensor)
        checked = carried is not tensor and name not in self.warned
        if checked and tell_of_lost_values(f"input {name}", tensor, carried):
            self.warned.add(name)
        return carried


def first_micro_batch(arguments: Arguments, splits: int) -> Arguments:
    """The rows of the first micro-batch of every tensor."""
    leaves = []
    for name, leaf in zip(arguments.names, arguments.leaves, strict=True):
        if isinstance(leaf, Tensor):
            rows = micro_batch_size(name, leaf.shape, splits)
            leaf = leaf.detach().contiguous()
            leaf = leaf.narrow(0, 0, rows) if leaf.dim() else leaf
        leaves.append(leaf)
    return Arguments(tuple(leaves), arguments.spec, arguments.names)


def _refuse_shared(
    names: Sequence[str], tensors: Sequence[Tensor], changed: Collection[str]
) -> None:
    """Raise when an input that the model changes in place shares memory with another one."""
    owner: dict[int, str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        other = owner.setdefault(tensor.untyped_storage().data_ptr(), name)
        if other != name and (name in changed or other in changed):
            raise InputError(
                f"inputs {other} and {name} share memory, and the model changes one in place",
                hint="pass a clone of one of them",
            )
