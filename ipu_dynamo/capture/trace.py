"""Trace a module's Python once into a Capture of high-level operators, before autograd."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ipu_dynamo.capture.capture import RESERVED, Capture, OutputRole, Placeholder, Structure
from ipu_dynamo.capture.custom_function import custom_functions_kept, refuse_hooks
from ipu_dynamo.capture.torch_private import (
    DATA_DEPENDENT,
    fake_mode,
    flatten,
    flatten_with_path,
    is_fake,
    key_text,
    pytree,
    quote_source_of,
    seen_as_compiling,
    to_fake,
    trace_once,
)
from ipu_dynamo.errors import CompileError, raised_at

aten = torch.ops.aten
Model = nn.Module | Callable[..., Any]


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call, flattened.

    Args:
        leaves: tensors and other Python values, in order.
        spec: nesting of `(args, kwargs)`.
        names: for each leaf, the argument's name with its path, as in `batch['x'][0]`.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    names: tuple[str, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def tensor_names(self) -> list[str]:
        pairs = zip(self.leaves, self.names, strict=True)
        return [name for leaf, name in pairs if isinstance(leaf, Tensor)]

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with `tensors` in place of the tensor leaves."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def read_arguments(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Flatten a call's arguments and name each leaf after the parameter that receives it."""
    names = _positional_names(model, len(args))
    paths, spec = flatten_with_path((tuple(args), dict(kwargs)))
    leaf_names = []
    for path, _ in paths:
        group, key = (getattr(entry, "idx", None) for entry in path[:2])
        first = names[key] if group == 0 and key is not None else str(path[1].key)  # type: ignore[attr-defined]
        leaf_names.append(first + key_text(path[2:]))
    return Arguments(tuple(leaf for _, leaf in paths), spec, tuple(leaf_names))


def trace(model: Model, arguments: Arguments, *, training: bool) -> Capture:
    """Run `model` once on fake tensors of the arguments' shapes.

    Args:
        model: a module, or any callable on tensors.
        arguments: one micro-batch; values of tensors are not looked at.
        training: trace with gradients on, and keep custom autograd functions.

    Raises:
        CompileError: the Python depends on the value of a tensor, replaces a parameter or
            buffer, or uses what a graph cannot express.
    """
    if isinstance(model, nn.Module) and training:
        refuse_hooks(model)
    quote_source_of(model.forward if isinstance(model, nn.Module) else model)
    held = _named_tensors(model)
    mode = fake_mode()
    fakes = [to_fake(mode, t if training and p.trainable else t.detach()) for p, t in held]
    inputs = [to_fake(mode, _plain(tensor)) for tensor in arguments.tensors]
    returned: list[Structure] = []

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        ours, theirs = tensors[: len(held)], tensors[len(held) :]
        swaps = {id(real): fake for (_, real), fake in zip(held, ours, strict=True)}
        args, kwargs = arguments.rebuild(theirs)
        with _swapped(model, swaps):
            leaves, spec = flatten(model(*args, **kwargs))
        positions = tuple(i for i, leaf in enumerate(leaves) if is_fake(leaf))
        kept = tuple(None if i in positions else leaf for i, leaf in enumerate(leaves))
        returned.append(Structure(spec, kept, positions))
        return tuple(leaves[i] for i in positions)

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(training))
        stack.enter_context(seen_as_compiling())
        stack.enter_context(custom_functions_kept())
        try:
            graph = trace_once(run, [*fakes, *inputs], mode)
        except DATA_DEPENDENT as error:
            raise CompileError(
                "Python code depends on the value of a tensor, which is not known when compiling",
                where=raised_at(error.__traceback__),
                hint="compute with tensors (torch.where), or move the decision out of the model",
            ) from error
    placeholders = [role for role, _ in held]
    for name in arguments.tensor_names:
        placeholders.append(Placeholder(_unused(name, placeholders), "input"))
    capture = Capture(
        graph=graph,
        placeholders=tuple(placeholders),
        outputs=(),
        tensors={role.name: tensor for role, tensor in held},
        structure=returned[-1],
        training=training,
    )
    _finish_outputs(capture)
    _lift_constants(capture, model)
    for node in capture.graph.graph.nodes:
        node.meta.setdefault("val", None)  # markers and mode switches give no value
    capture.graph.recompile()
    capture.check()
    return capture


def _unused(name: str, roles: Sequence[Placeholder]) -> str:
    """`name`, primed until neither a role nor an input that passes add is called so."""
    taken = {role.name for role in roles} | RESERVED
    while name in taken:
        name += "'"
    return name


def _plain(tensor: Tensor) -> Tensor:
    """`tensor` without its history, and without that of inference mode."""
    with torch.inference_mode(False):
        return tensor.clone() if tensor.is_inference() else tensor.detach()


def _positional_names(model: Model, count: int) -> list[str]:
    """The names of the first `count` positional parameters; `args[i]` inside `*args`."""
    function = model.forward if isinstance(model, nn.Module) else model
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(parameter.name)
    return names + [f"argument {i}" for i in range(len(names), count)]


def _named_tensors(model: Model) -> list[tuple[Placeholder, Tensor]]:
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
def _swapped(model: Model, swaps: Mapping[int, Tensor]) -> Iterator[None]:
    """Put stand-ins in place of a module's tensors; refuse a model that replaces them itself."""
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    slots = [
        (kind, path, slot, name, tensor)
        for path, module in modules.items()
        for kind, slot in (("Parameter", module._parameters), ("Buffer", module._buffers))
        for name, tensor in slot.items()
        if tensor is not None
    ]
    for _, _, slot, name, tensor in slots:
        slot[name] = swaps[id(tensor)]
    try:
        yield
        for kind, path, slot, name, tensor in slots:
            full = f"{path}.{name}" if path else name
            if name not in slot:
                raise CompileError(
                    f"{kind} {full} is removed from the model when calling the forward method.",
                    hint="register it once, in the constructor, and keep it",
                )
            if slot[name] is not swaps[id(tensor)]:
                raise CompileError(
                    f"{kind} {full} is reassigned within the model when calling the forward "
                    f"method. This is not supported. Consider using self.{full}.copy_(src) "
                    f"to copy data from a source tensor, where src is the name of the source "
                    f"tensor.",
                )
    finally:
        for _, _, slot, name, tensor in slots:
            slot[name] = tensor


def _finish_outputs(capture: Capture) -> None:
    """Describe the returned tuple, and turn the output into a flat tuple."""
    nodes = list(capture.output_node.args[0])  # type: ignore[arg-type]
    roles = [OutputRole("value", str(i)) for i in range(len(nodes))]
    capture.set_returned(nodes, roles)


def _lift_constants(capture: Capture, model: Model) -> None:
    """Turn tensors from outside the module into placeholders that hold their present values."""
    graph, tensors = capture.graph.graph, dict(capture.tensors)
    known = _attribute_names(model)
    roles = list(capture.placeholders)
    lifted_before: dict[str, torch.fx.Node] = {}
    for node in list(graph.find_nodes(op="get_attr")):
        value = getattr(capture.graph, str(node.target))
        if not isinstance(value, Tensor):
            continue
        if str(node.target) in lifted_before:
            node.replace_all_uses_with(lifted_before[str(node.target)])
            graph.erase_node(node)
            continue
        made_inside = all(user.target is aten.lift_fresh_copy.default for user in node.users)
        name = _unused(known.get(id(value), str(node.target)), roles)
        if not made_inside:
            warnings.warn(
                f"the tensor {name} {tuple(value.shape)} is neither an input, a parameter nor a "
                f"buffer; its present value becomes a constant of the program",
                stacklevel=2,
            )
        last = capture.placeholder_nodes[-1:]
        with graph.inserting_after(last[0]) if last else graph.inserting_before(None):
            lifted = graph.placeholder(str(node.target).lstrip("_"))
        lifted.meta["val"] = node.meta["val"] if "val" in node.meta else _fake_of(capture, value)
        node.replace_all_uses_with(lifted)
        graph.erase_node(node)
        lifted_before[str(node.target)] = lifted
        roles.append(Placeholder(name, "constant"))
        tensors[name] = value.detach().clone()
    capture.placeholders, capture.tensors = tuple(roles), tensors


def _fake_of(capture: Capture, value: Tensor) -> Tensor:
    """A fake of `value` in the mode of the graph's other values."""
    for node in capture.graph.graph.nodes:
        if is_fake(node.meta.get("val")):
            return to_fake(node.meta["val"].fake_mode, value)
    return to_fake(fake_mode(), value)


def _attribute_names(model: Model) -> dict[int, str]:
    """Dotted names of plain tensor attributes in a module, by identity."""
    if not isinstance(model, nn.Module):
        return {}
    return {
        id(value): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
