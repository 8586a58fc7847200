"""Lay the tensors of an update out as the list operators want them.

The fused operators walk raw memory: within one parameter the weight, its gradient and its states
must have one dtype and the same strides. A tensor that differs is given a buffer, filled before the
operator and, unless it is a gradient, written back after it. So arithmetic is done in the widest
dtype among a parameter's tensors, and every tensor is rounded to its own dtype once.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import foreach_copy_, foreach_div_
from ipu_dynamo.program.ir.update_rules import Rule, StateSpec
from ipu_dynamo.runtime.update.rounding import HalfRounder


class Batch:
    """Parameters of one dtype, with everything an operator needs to update them in one call.

    Invariant: after `load` the lists hold the current values, in one dtype and, tensor by tensor,
    one layout. After `store` the caller's tensors hold the lists' values, except for gradients.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        specs: Sequence[StateSpec],
        rounding: HalfRounder | None = None,
    ) -> None:
        self.dtype, self.device, self._rounding = dtype, device, rounding
        self.parameters: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.states: dict[str, list[Tensor]] = {spec.name: [] for spec in specs}
        self._specs = specs
        self._loads: tuple[list[Tensor], list[Tensor]] = ([], [])  # to, from
        self._stores: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._rounded: tuple[list[Tensor], list[Tensor]] = ([], [])  # stored at random
        self._divisor: Tensor | None = None

    def add(self, parameter: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
        """Take in one parameter; `states` are all its states."""
        layout = torch.empty_like(parameter, dtype=self.dtype, device="meta")
        at_random = self._rounding is not None and parameter.dtype == torch.float16
        stores = self._rounded if at_random else self._stores
        self.parameters.append(self._bind(parameter, layout, stores))
        self.gradients.append(self._bind(gradient, layout, None))
        for name, shape, _, _ in self._specs:
            state = states[name]
            if shape == "like_parameter":
                state = self._bind(state, layout, self._stores)
            self.states[name].append(state)

    def scale_by(self, divisor: Tensor | None) -> Tensor | None:
        """Arrange that gradients are divided; return the divisor left for the fused operator.

        The operators divide in their own pass, but only by a float32 number: `load` does the rest.
        """
        if divisor is None or divisor.dtype == torch.float32:
            return divisor
        self._divisor = divisor
        return None

    def load(self) -> None:
        """Bring the buffers up to date, and divide the gradients if the operator will not."""
        if self._loads[0]:
            foreach_copy_(*self._loads)
        if self._divisor is not None:
            foreach_div_(self.gradients, self._divisor)

    def store(self) -> None:
        """Write the buffers back."""
        if self._stores[0]:
            foreach_copy_(*self._stores)
        if self._rounding is not None and self._rounded[0]:
            self._rounding.store(*self._rounded)

    def _bind(
        self, tensor: Tensor, layout: Tensor, stores: tuple[list[Tensor], list[Tensor]] | None
    ) -> Tensor:
        """Return `tensor` itself if it fits `layout`, else a buffer for its values.

        `stores` gets the buffer, if it is to be written back.
        """
        if tensor.dtype == layout.dtype and tensor.stride() == layout.stride():
            return tensor
        buffer = torch.empty_like(layout, device=self.device)
        self._loads[0].append(buffer)
        self._loads[1].append(tensor)
        if stores is not None:
            stores[0].append(tensor)
            stores[1].append(buffer)
        return buffer


def batches(
    rule: Rule,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    states: Mapping[str, Sequence[Tensor]],
    rounding: HalfRounder | None = None,
    *,
    divided: bool = False,
) -> tuple[Batch, ...]:
    """Group parameters that have a gradient by the dtype of their arithmetic, in order.

    Args:
        rounding: how half parameters are written; None rounds to the nearest.
        divided: gradients are divided first; in half precision small ones would become zero.

    Raises:
        ValueError: lists of different lengths, tensors of different shapes or devices, or a dtype
            that is not a real floating-point one.
    """
    specs = rule.state_names()
    lengths = {"gradients": len(gradients), **{s.name: len(states[s.name]) for s in specs}}
    for name, length in lengths.items():
        if length != len(parameters):
            raise ValueError(f"{length} {name} for {len(parameters)} parameters")
    made: dict[torch.dtype, Batch] = {}
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is None:
            continue
        own = {spec.name: states[spec.name][index].detach() for spec in specs}
        shaped = [gradient, *(own[s.name] for s in specs if s.shape == "like_parameter")]
        for tensor in (parameter, *shaped):
            _check(tensor, parameter, index, parameters[0].device)
        dtype = reduce(torch.promote_types, [t.dtype for t in shaped], parameter.dtype)
        if rounding is not None or divided:
            dtype = torch.promote_types(dtype, torch.float32)
        if dtype not in made:
            made[dtype] = Batch(dtype, parameter.device, specs, rounding)
        made[dtype].add(parameter.detach(), gradient.detach(), own)
    return tuple(made.values())


def new_states(rule: Rule, parameters: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Make the states of parameters that step together: name -> one tensor per parameter.

    A scalar state is one tensor, repeated at every place of its list.
    """
    states: dict[str, list[Tensor]] = {}
    for name, shape, initial, dtype in rule.state_names():
        if shape == "like_parameter":
            states[name] = [
                torch.full_like(p, initial, dtype=dtype, requires_grad=False) for p in parameters
            ]
        elif parameters:
            one = torch.full((), initial, dtype=dtype, device=parameters[0].device)
            states[name] = [one] * len(parameters)
        else:
            states[name] = []
    return states


def distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`tensors` without repetitions of the same memory, in order."""
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())


def _check(tensor: Tensor, parameter: Tensor, index: int, device: torch.device) -> None:
    """Refuse a tensor that the operators would read wrongly."""
    if tensor.shape != parameter.shape:
        raise ValueError(
            f"parameter {index} has shape {list(parameter.shape)}, "
            f"one of its tensors {list(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"parameter {index} has a tensor on {tensor.device}, not on {device}")
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"parameter {index} has a tensor of dtype {tensor.dtype}")
