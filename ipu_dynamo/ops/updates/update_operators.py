"""Define an operator for each rule, such as `ipu::adam`: a pure step of one parameter.

Its kernel defines the values; compilers write the rule's function in its place.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.ops.updates.update_functions import FUNCTIONS, HYPERPARAMETERS, SCALAR_STATES
from ipu_dynamo.ops.updates.update_kernels import KERNELS
from ipu_dynamo.ops.updates.update_values import Call, Value

# The states of each rule in the order of an operator's arguments; flags say which there are.
STATES: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum_buffer", "momentum_started"),
    "adam": ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "rmsprop": ("step", "square_avg", "momentum_buffer", "grad_avg"),
    "lamb": ("step", "exp_avg", "exp_avg_sq"),
}
_library = torch.library.Library("ipu", "FRAGMENT")


def _named(rule: str, values: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states and the hyperparameters among an operator's arguments that are not None."""
    names = (*STATES[rule], *HYPERPARAMETERS[rule])
    given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    count = len(STATES[rule])
    return (
        {name: given[name] for name in names[:count] if name in given},
        {name: given[name] for name in names[count:] if name in given},
    )


def _wide(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of the arithmetic: the widest of a parameter's tensors."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _step(
    rule: str, weight: Tensor, gradient: Tensor, *values: Tensor | None, flags: Sequence[str]
) -> list[Tensor]:
    """The next weight and states, by the rule's kernel; each is rounded to its own dtype once."""
    states, numbers = _named(rule, values)
    shaped = [state for name, state in states.items() if name not in SCALAR_STATES]
    dtype = _wide([weight, gradient, *shaped])

    def copied(name: str, tensor: Tensor) -> Tensor:
        if name in SCALAR_STATES:
            return tensor.reshape(()).to(torch.float32, copy=True) + (name == "step")
        return torch.empty_like(weight, dtype=dtype).copy_(tensor)

    new = {name: copied(name, state) for name, state in states.items()}
    w, lists = copied("", weight), {name: [state] for name, state in new.items()}
    kernel = KERNELS[rule](frozenset(flags), [w], [copied("", gradient)], lists, None)
    kernel(*(float(numbers.get(name, 0.0)) for name in HYPERPARAMETERS[rule]))
    return [w.to(weight.dtype), *(new[name].to(state.dtype) for name, state in states.items())]


def _fake(
    rule: str, weight: Tensor, gradient: Tensor, *values: Tensor | None, flags: Sequence[str]
) -> list[Tensor]:
    states, _ = _named(rule, values)
    likes = [(state if name in SCALAR_STATES else weight, state) for name, state in states.items()]
    return [torch.empty_like(weight), *(torch.empty_like(a, dtype=b.dtype) for a, b in likes)]


def decompose(
    rule: str, call: Call, weight: Any, gradient: Any, *values: Any, flags: Sequence[str]
) -> list[Any]:
    """Write a rule's function in place of its operator; return the operator's results.

    Args:
        call: writes an operator, or runs it.
        weight, gradient, values: the operator's arguments: nodes, or tensors.
    """
    states, numbers = (
        {name: Value(call, value) for name, value in named.items()}
        for named in _named(rule, values)
    )
    own, w, g = {**states}, Value(call, weight), Value(call, gradient)
    shaped = {name: state for name, state in states.items() if name not in SCALAR_STATES}
    dtype = _wide([value.fake for value in (w, g, *shaped.values())])
    states |= {name: state.to(dtype).clone() for name, state in shaped.items()}
    if "step" in states:
        states["step"] = states["step"].clone()
        states["step"].add_(1.0)
    new = w.to(dtype).clone()
    FUNCTIONS[rule](new, g.to(dtype), states, numbers, frozenset(flags))
    return [new.to(w.dtype).now, *(states[name].to(own[name].dtype).now for name in own)]


def _define(rule: str) -> OpOverload:
    names = ", ".join(f"Tensor? {name}" for name in (*STATES[rule], *HYPERPARAMETERS[rule]))
    _library.define(f"{rule}(Tensor weight, Tensor gradient, {names}, *, str[] flags) -> Tensor[]")
    _library.impl(rule, partial(_step, rule), "CompositeExplicitAutograd")
    torch.library.register_fake(f"ipu::{rule}", partial(_fake, rule), lib=_library)
    operator: OpOverload = getattr(torch.ops.ipu, rule).default
    return operator


OPERATORS: Mapping[str, OpOverload] = {rule: _define(rule) for rule in FUNCTIONS}
# Each takes `call` and the operator's arguments, and returns the operator's results.
DECOMPOSITIONS: Mapping[object, Callable[..., list[Any]]] = {
    operator: partial(decompose, rule) for rule, operator in OPERATORS.items()
}
