"""Let a model call the host in the middle of a program."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ipu_dynamo import HostFunction
from poptorch.errors import createPoptorchError
from poptorch.tracing import current_trace


class CPU:
    """A function or module that the host runs in the middle of a program, for inference.

    It gets the values of tensors, once for each micro-batch; while compiling it is called once, on
    zeros. Outside a model that is compiled it is just called.

    Args:
        layer_to_call: takes tensors; a module's parameters stop to require gradients.
        ID: what programs and errors call it.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        if isinstance(layer_to_call, nn.Module):
            layer_to_call.requires_grad_(False)
        self._layer_to_call, self._ID = layer_to_call, ID
        self._inputs: tuple[Any, ...] = ()
        self.outputs: Any = None
        self.registerPersistentData()

    def registerPersistentData(self) -> None:
        """Make the function known to the compiler by its `ID`; the constructor does it."""
        self._function = HostFunction(self._layer_to_call, self._ID)

    def execute(self) -> None:
        """Run the function on the inputs of the last call outside a program, into `outputs`."""
        self.outputs = self._layer_to_call(*self._inputs)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the results of the function.

        Args:
            inputs: tensors, which the function gets.
            kwargs: are ignored, as in PopTorch.

        Raises:
            poptorch.Error: in a model that is compiled for training.
        """
        trace = current_trace()
        if trace is None:
            self._inputs = inputs
            self.execute()
            return self.outputs
        if trace.training:
            raise createPoptorchError("poptorch.CPU is only supported in inference.", id="operator")
        return self._function(*inputs)


__all__ = ["CPU"]
