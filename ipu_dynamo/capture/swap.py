"""Put stand-ins in place of a module's tensors while its Python is traced, and take them out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ipu_dynamo import noted_warnings
from ipu_dynamo.capture.capture import Placeholder
from ipu_dynamo.capture.outside import TensorAttribute
from ipu_dynamo.capture.private.kept_tensors import has_value, is_left, origin_of, real_of
from ipu_dynamo.capture.private.own_tensors import own_tensors_elsewhere
from ipu_dynamo.errors import CompileError, called_from
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

Model = nn.Module | Callable[..., Any]


def named_tensors(model: Model) -> list[tuple[Placeholder, Tensor]]:
    """Parameters and buffers of a module, tied ones once, under their first name."""
    if not isinstance(model, nn.Module):
        return []
    parameters = [
        (Placeholder(name, "parameter", tensor.requires_grad), tensor)
        for name, tensor in model.named_parameters()
    ]
    buffers = [(Placeholder(name, "buffer"), tensor) for name, tensor in model.named_buffers()]
    return parameters + buffers


@contextmanager
def swapped(
    model: Model, swaps: Mapping[int, Tensor]
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Put stand-ins in place of a module's tensors; refuse a model that replaces them itself.

    Other threads find the module's own tensors, unless they look into its dictionaries.
    Yields a function whose context puts the module's own tensors back for a while.
    """
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    slots = [
        (kind, path, slot, name, tensor)
        for path, module in modules.items()
        for kind, slot in (("Parameter", module._parameters), ("Buffer", module._buffers))
        for name, tensor in slot.items()
        if tensor is not None
    ]
    assigned: dict[tuple[int, str], str] = {}  # the line that did, by a module's slots and a name
    registered = {(id(slot), name) for _, _, slot, name, _ in slots}
    set_attribute = nn.Module.__setattr__

    def noted(module: nn.Module, name: str, value: Any) -> None:
        for kind in ("_parameters", "_buffers"):  # which a module has after its `__init__`
            slot = vars(module).get(kind)
            if (id(slot), name) in registered:
                assigned[id(slot), name] = called_from()
        set_attribute(module, name, value)

    @contextmanager
    def own_tensors() -> Iterator[None]:
        present = [(slot, name, slot[name]) for _, _, slot, name, _ in slots if name in slot]
        for _, _, slot, name, tensor in slots:
            slot[name] = tensor
        try:
            yield
        finally:
            for slot, name, stand_in in present:
                slot[name] = stand_in

    stack = ExitStack()
    try:
        stack.enter_context(
            own_tensors_elsewhere({id(swaps[id(tensor)]): tensor for *_, tensor in slots})
        )
        for _, _, slot, name, tensor in slots:
            slot[name] = swaps[id(tensor)]
        with replaced(nn.Module, "__setattr__", in_this_thread(noted, set_attribute)):
            yield own_tensors
        for kind, path, slot, name, tensor in slots:
            full = f"{path}.{name}" if path else name
            if name not in slot:
                raise CompileError(
                    f"{kind} {full} is removed from the model when calling the forward method.",
                    hint="register it once, in the constructor, and keep it",
                    id="in-place",
                )
            if slot[name] is not swaps[id(tensor)]:
                raise CompileError(
                    f"{kind} {full} is reassigned within the model when calling the forward "
                    f"method. This is not supported. Consider using self.{full}.copy_(src) "
                    f"to copy data from a source tensor, where src is the name of the source "
                    f"tensor.",
                    where=assigned.get((id(slot), name), ""),
                    id="in-place",
                )
    finally:
        for _, _, slot, name, tensor in slots:
            slot[name] = tensor
        stack.close()


def copied_attributes(
    model: Model, device: torch.device | None = None
) -> dict[int, TensorAttribute]:
    """Plain tensor attributes of a module, by identity, with copies on `device`; None: theirs."""
    attributes: dict[int, TensorAttribute] = {}
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    for path, module in modules:
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) not in attributes:
                full = f"{path}.{name}" if path else name
                copy = value.detach().to(device, copy=True)
                attributes[id(value)] = TensorAttribute(full, value, copy, vars(module), name)
    return attributes


@contextmanager
def attributes_swapped(model: Model, attributes: Mapping[int, TensorAttribute]) -> Iterator[None]:
    """Put the copies in place of plain tensor attributes."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    places = [
        (vars(module), name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and id(value) in attributes
    ]
    for slots, name, value in places:
        slots[name] = attributes[id(value)].copy
    try:
        yield
    finally:
        for slots, name, value in places:
            slots[name] = value


def attributes_of(model: Model) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """List each module's path, with each dictionary of its attributes, buffers or parameters, and
    a copy of that dictionary."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return [
        (path, held, dict(held))
        for path, module in modules
        for held in (vars(module), module._buffers, module._parameters)
    ]


def restore_attributes(before: Sequence[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    """Take tensors of a trace out of a model. Constants become tensors with values. Other
    attributes get their values from before the trace again, with a warning."""
    for path, held, earlier in before:
        for name, value in list(held.items()):
            if not is_left(value):
                _fill_in(value)
            elif has_value(value):
                held[name] = real_of(value)
            else:
                full = f"{path}.{name}" if path else name
                noted_warnings.warn(
                    f"forward keeps a tensor in {full}, where a program leaves no value: it is as "
                    f"before, and each call of the program finds it so\n  from: {origin_of(value)}"
                    f"\n  try:  return the tensor, or copy_ into a buffer",
                )
                if name in earlier:
                    held[name] = earlier[name]
                else:
                    del held[name]


def _fill_in(container: Any) -> None:
    """Put values in place of constants of a trace that a list or dictionary has kept."""
    if isinstance(container, list | dict):
        places = container.items() if isinstance(container, dict) else enumerate(container)
        for place, value in list(places):
            if is_left(value) and has_value(value):
                container[place] = real_of(value)
