"""Trace a module's Python once into a capture of high-level operators, before autograd."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from ipu_dynamo.capture.capture import OutputRole, Placeholder, Report, Structure, Traced, unused
from ipu_dynamo.capture.control_flow.higher_order import higher_order_recorded
from ipu_dynamo.capture.control_flow.vectorised import vectorised_calls
from ipu_dynamo.capture.custom.custom_function import custom_functions_kept, refuse_hooks
from ipu_dynamo.capture.custom.host_functions import HostCalls, host_calls
from ipu_dynamo.capture.custom.inner_gradients import RequiredGradients, remove_unread_marks
from ipu_dynamo.capture.host_changes import known_values
from ipu_dynamo.capture.layers.checked_losses import CheckedLosses
from ipu_dynamo.capture.layers.ctc_losses import CtcLosses
from ipu_dynamo.capture.layers.dynamic_slices import DynamicSlices, refuse_written_windows
from ipu_dynamo.capture.layers.filled_indices import FilledIndices
from ipu_dynamo.capture.layers.mixed_precision import MixedPrecision
from ipu_dynamo.capture.layers.recurrent_layers import RecurrentLayers
from ipu_dynamo.capture.outside import OutsideReads, holds_tensors
from ipu_dynamo.capture.private.cumulative_norms import batches_counted
from ipu_dynamo.capture.private.dynamo import compiled_part
from ipu_dynamo.capture.private.inference_regions import inference_regions_recorded
from ipu_dynamo.capture.private.kept_tensors import leave, look_of
from ipu_dynamo.capture.private.tracing import (
    DATA_DEPENDENT,
    fake_mode,
    flatten,
    flatten_with_path,
    is_fake,
    key_text,
    masks_unread,
    moved,
    pytree,
    quiet_fake_tensors,
    quote_source_of,
    scripts_recorded,
    seen_as_compiling,
    shape_of_values,
    to_fake,
    trace_once,
)
from ipu_dynamo.capture.random_states import draws_reported
from ipu_dynamo.capture.scopes import CALLER, SCOPE, module_scopes
from ipu_dynamo.capture.swap import (
    Model,
    attributes_of,
    attributes_swapped,
    copied_attributes,
    named_tensors,
    restore_attributes,
    swapped,
)
from ipu_dynamo.capture.tensor_objects import objects_followed
from ipu_dynamo.capture.tracing_errors import explain, operator_of
from ipu_dynamo.errors import CompileError, InputError, keep_user_line, note_module, raised_at
from ipu_dynamo.ops.control_flow import FLOW
from ipu_dynamo.ops.library.host_call import KnownFunction
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.ops.private.native import NormBase


class UnknownClasses(CompileError):
    """`one_hot` is to find out by itself how many classes there are."""


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
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def read_arguments(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Flatten a call's arguments and name each leaf after the parameter that receives it.

    Raises:
        InputError: a leaf is an array of numpy, whose values would stay those of the first call.
    """
    names = _positional_names(model, len(args))
    paths, spec = flatten_with_path((tuple(args), dict(kwargs)))
    leaf_names = []
    for path, _ in paths:
        group, key = (getattr(entry, "idx", None) for entry in path[:2])
        first = names[key] if group == 0 and key is not None else str(path[1].key)  # type: ignore[attr-defined]
        leaf_names.append(first + key_text(path[2:]))
    for name, (_, leaf) in zip(leaf_names, paths, strict=True):
        if isinstance(leaf, np.ndarray):
            raise InputError(
                f"argument {name} is an array of numpy, of type {leaf.dtype}",
                hint=f"pass a tensor: torch.from_numpy({name}), and its .float() to a model in "
                "float32",
            )
    return Arguments(tuple(leaf for _, leaf in paths), spec, tuple(leaf_names))


def trace(
    model: Model,
    arguments: Arguments,
    *,
    training: bool,
    mixed_precision: bool = False,
    grouped: Collection[str] = (),
    device: torch.device | None = None,
    module_names: bool = True,
    norms_count: bool = True,
) -> Traced:
    """Run `model` once on fake tensors of the arguments' shapes.

    Args:
        model: a module, or any callable on tensors.
        arguments: one micro-batch; values of tensors are not looked at.
        training: trace with gradients on, and keep custom autograd functions.
        mixed_precision: let layers convert their weights to the precision of their input.
        grouped: names of parameters and buffers that have a leading dimension over groups of
            replicas, which forward does not see.
        device: the assumed device of the model's tensors and inputs, and of new tensors that ask
            for no device. None: their own.
        module_names: note which module calls each operator.
        norms_count: batch norms count their batches; else their counts are constants.

    Raises:
        CompileError: the Python depends on the value of a tensor, replaces a parameter or
            buffer, or has effects that a graph cannot express.
    """
    if (path := compiled_part(model)) is not None:
        raise CompileError(
            f"{path or 'the model'} is compiled by torch.compile already",
            hint="pass the module or function itself; the module that was wrapped is ._orig_mod",
        )
    if isinstance(model, nn.Module) and training:
        refuse_hooks(model)
    quote_source_of(model.forward if isinstance(model, nn.Module) else model)
    _refuse_unknown_objects(arguments)
    held, state = named_tensors(model), attributes_of(model)
    if not norms_count:
        held = _counts_as_constants(model, held)
    mode = fake_mode()
    seen = [_slice(t) if p.name in grouped else t for p, t in held]
    differentiated = [training and p.trainable for p, _ in held]
    fakes = [
        to_fake(mode, t if w else t.detach()) for t, w in zip(seen, differentiated, strict=True)
    ]
    inputs = [to_fake(mode, _plain(tensor)) for tensor in arguments.tensors]
    fakes, inputs = (moved(mode, tensors, device) for tensors in (fakes, inputs))
    attributes = copied_attributes(model, device)
    returned: list[Structure] = []
    host_functions: list[KnownFunction] = []
    names: dict[int, str] = {}  # by the identity of the stand-in
    reads: list[OutsideReads] = []

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        ours, theirs = tensors[: len(held)], tensors[len(held) :]
        roles = [*(role.name for role, _ in held), *arguments.tensor_names]
        names.update((id(tensor), name) for tensor, name in zip(tensors, roles, strict=True))
        swaps = {id(real): fake for (_, real), fake in zip(held, ours, strict=True)}
        args, kwargs = arguments.rebuild(theirs)
        reads.append(OutsideReads(attributes, swaps))
        for tensor in theirs:
            reads[-1].watch(tensor)
        with swapped(model, swaps) as own_tensors, attributes_swapped(model, attributes):
            with (
                host_calls(HostCalls(training, own_tensors, host_functions)),
                RecurrentLayers() as layers,
                MixedPrecision() if mixed_precision else nullcontext(),
                CheckedLosses(training=training),
                CtcLosses(),
                FilledIndices(),
                DynamicSlices(),
                RequiredGradients(),
                inference_regions_recorded(),
                module_scopes(model) if module_names else nullcontext(),
                draws_reported(),
                reads[-1],
            ):
                returns = model(*args, **kwargs)
            leaves, spec = flatten(returns)
        layers.packed.refuse_returned(leaves)
        _refuse_unknown_results(leaves)
        positions = tuple(i for i, leaf in enumerate(leaves) if is_fake(leaf))
        kept = tuple(None if i in positions else leaf for i, leaf in enumerate(leaves))
        returned.append(Structure(spec, kept, positions))
        return tuple(leaves[i] for i in positions)

    with ExitStack() as stack:
        stack.enter_context(compile_lock())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(training))
        stack.enter_context(seen_as_compiling())
        stack.enter_context(masks_unread())
        stack.enter_context(scripts_recorded())
        stack.enter_context(objects_followed())
        if device is not None:
            stack.enter_context(device)
        calls = stack.enter_context(custom_functions_kept())
        stack.enter_context(vectorised_calls())
        stack.enter_context(higher_order_recorded())
        if norms_count:
            stack.enter_context(batches_counted())
        stack.enter_context(quiet_fake_tensors())
        graph: fx.GraphModule | None = None
        try:
            graph = trace_once(run, [*fakes, *inputs], mode)
        except DATA_DEPENDENT as error:
            problem, hint = "Python code depends on the value of a tensor", "compute with tensors"
            if operator_of(error) == "one_hot":
                raise UnknownClasses(
                    "one_hot without num_classes takes their number from the values of its input, "
                    "which are not known when compiling",
                    where=raised_at(error.__traceback__),
                    hint="one_hot(x, num_classes=n)",
                    id="value",
                ) from error
            example = "torch.where"
            if operator := shape_of_values(error):
                problem = f"the shape of what {operator} returns depends on the values of its input"
                hint = "compute with tensors of fixed shapes"
            if operator == "aten.nonzero":  # PyTorch asks for it where a mask is an index
                problem = (
                    "the shape of what a mask selects (x[mask], nonzero) depends on its values"
                )
                example = "x.masked_fill(~mask, 0) for sums, torch.where(mask, new, x) for changes"
            raise CompileError(
                f"{problem}, which is not known when compiling",
                where=raised_at(error.__traceback__),
                hint=f"{hint} ({example}), or move the decision out of the model",
                id="value",
            ) from error
        except Exception as error:  # of the user's code, or raised by torch for it
            if str(error).startswith(".numpy() is not supported"):
                raise CompileError(
                    "Python code depends on the value of a tensor as a NumPy array, which is not "
                    "known when compiling",
                    where=raised_at(error.__traceback__),
                    hint="compute with functions of torch, or, in inference, call the host: "
                    "ipu_dynamo.HostFunction, poptorch.CPU",
                    id="value",
                ) from error
            made = [role for role, tensor in held if tensor.is_inference()]
            if made and "inference tensor" in str(error).lower():
                raise CompileError(
                    f"the {made[0].kind} {made[0].name} was made under torch.inference_mode(), so "
                    "that PyTorch allows no change of it and no gradient",
                    where=raised_at(error.__traceback__),
                    hint="make the model outside, or copy it there by copy.deepcopy",
                ) from error
            explain(error, names)
            raise
        finally:
            inputs.clear()  # tensors still alive after this were kept by Python
            if reads:
                _settle(reads[-1], graph)
                restore_attributes(state)
    placeholders = [role for role, _ in held]
    for name in arguments.tensor_names:
        placeholders.append(Placeholder(unused(name, placeholders), "input"))
    refuse_written_windows(graph.graph)
    report = Report(
        structure=returned[-1],
        tensors={role.name: tensor for role, tensor in held},
        attributes={id(a.copy): (a.name, a.tensor) for a in attributes.values()},
        outside=reads[-1].of(graph),
        calls=tuple(calls),
        host_functions=tuple(host_functions),
    )
    capture = Traced(
        graph=graph,
        placeholders=tuple(placeholders),
        outputs=(),
        training=training,
        report=report,
    )
    _finish_outputs(capture)
    remove_unread_marks(capture.graph.graph)
    for node in capture.graph.graph.nodes:
        node.meta.setdefault("val", None)  # markers and mode switches give no value
        node.meta.setdefault(SCOPE, "")
        if node.op == "call_function" and module_names:
            note_module(node, *node.meta.pop(CALLER, ("", type(model).__name__)))
        keep_user_line(node)
    capture.graph.recompile()
    return capture


def _settle(reads: OutsideReads, graph: fx.GraphModule | None) -> None:
    """Let no tensor of a trace that Python has kept pass for one with values.

    Args:
        graph: what was traced; None: an error ended it, and no value is known.
    """
    left = reads.left()
    nodes = [node for _, node, _ in left if node is not None]
    known = known_values(graph, nodes) if graph is not None and nodes else {}
    if graph is not None and left:
        _describe_by_fakes(graph.graph, {id(tensor) for tensor, _, _ in left})
    for tensor, node, where in left:
        leave(tensor, None if node is None else known.get(node), where)


def _describe_by_fakes(graph: fx.Graph, kept: Collection[int]) -> None:
    """Describe results of nodes, also in bodies, by new tensors that Python has no reference to."""

    def described(tensor: Tensor) -> Tensor:
        return look_of(tensor) if id(tensor) in kept else tensor

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(Tensor, described, node.meta["val"])
        if FLOW in node.meta:
            for body in node.meta[FLOW].bodies:
                _describe_by_fakes(body.graph.graph, kept)


def _refuse_unknown_objects(arguments: Arguments) -> None:
    for name, leaf in zip(arguments.names, arguments.leaves, strict=True):
        if not isinstance(leaf, Tensor) and holds_tensors(leaf):
            raise InputError(
                f"{name} is of class {type(leaf).__name__}, whose tensors are not found in calls",
                hint=_REGISTER,
            )


def _refuse_unknown_results(leaves: Sequence[Any]) -> None:
    """Refuse results of forward that have tensors only inside unknown objects.

    Next to tensors, as caches of language models are, they may go unread; their tensors raise.
    """
    if any(map(is_fake, leaves)):
        return
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and holds_tensors(leaf):
            raise CompileError(
                f"forward returns an object of class {type(leaf).__name__}, whose tensors are not "
                "found",
                hint=_REGISTER,
            )


_REGISTER = (
    "torch.utils._pytree.register_pytree_node, or register_dataclass, says what the class holds; "
    "tuples, lists, dictionaries and named tuples need nothing"
)


def _counts_as_constants(
    model: Model, held: list[tuple[Placeholder, Tensor]]
) -> list[tuple[Placeholder, Tensor]]:
    """The model's tensors, of which the counts of batch norms are constants."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    counts = {id(m.num_batches_tracked) for m in modules if isinstance(m, NormBase)}
    return [(replace(p, kind="constant") if id(t) in counts else p, t) for p, t in held]


def _plain(tensor: Tensor) -> Tensor:
    """`tensor` without its history, and without that of inference mode."""
    with torch.inference_mode(False):
        return tensor.clone() if tensor.is_inference() else tensor.detach()


def _slice(tensor: Tensor) -> Tensor:
    """A leaf with the layout of `tensor`'s slices along dim 0."""
    return tensor.detach()[0].requires_grad_(tensor.requires_grad)


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


def _finish_outputs(capture: Traced) -> None:
    """Describe the returned tuple, and turn the output into a flat tuple."""
    nodes = list(capture.output_node.args[0])  # type: ignore[arg-type]
    roles = [OutputRole("value", str(i)) for i in range(len(nodes))]
    capture.set_returned(nodes, roles)
