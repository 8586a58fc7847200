"""Run an optimiser's step in Python, after a program that ends with the gradients."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ipu_dynamo.program.ir.update_rules import HostStep
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group, name_of


def describe_host(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> tuple[Group, ...]:
    """The groups of an optimiser of any class.

    Raises:
        CompileError: it trains a tensor that is not in `parameters`.
    """
    names: dict[int, str] = {}
    for name, tensor in parameters.items():
        names.setdefault(id(tensor), name)
    return tuple(
        Group(
            HostStep(),
            tuple(
                name_of(tensor, names, index, place)
                for place, tensor in enumerate(group["params"])
                if tensor.requires_grad
            ),
            (),
        )
        for index, group in enumerate(optimizer.param_groups)
    )


class HostOptimizer:
    """Makes steps of an optimiser on the program's parameters.

    Args:
        optimizer: gives the one that is in use.
        parameters: gives the model's parameters by name.
        held: gives the program's tensor of a parameter, which may be the model's own.
    """

    def __init__(
        self,
        optimizer: Callable[[], Optimizer],
        parameters: Callable[[], Mapping[str, Tensor]],
        held: Callable[[str], Tensor],
    ) -> None:
        self._optimizer, self._parameters, self._held = optimizer, parameters, held

    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        """Make a step; parameters without a gradient in the program are not changed."""
        parameters = self._parameters()
        try:
            for name, gradient in gradients.items():
                parameter = parameters[name]
                parameter.grad = gradient.to(parameter.device, parameter.dtype)
            self._optimizer().step()
        finally:
            for name in gradients:
                parameters[name].grad = None
        with torch.no_grad():
            for name in gradients:
                own, parameter = self._held(name), parameters[name]
                if own.data_ptr() != parameter.data_ptr():
                    own.copy_(parameter)
                    if own.dtype == parameter.dtype and own.device == parameter.device:
                        parameter.data = own  # the step has put other memory in its place
