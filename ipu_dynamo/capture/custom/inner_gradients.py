"""Record gradients that a model takes in forward, and hooks on its tensors.

A trace records operators before autograd, but runs autograd on the tensors that stand for the
model's. So it knows which gradients there are. Each call becomes an operator of
`ops/marks/inner_gradients.py`. The pass `Differentiate` runs autograd for the program, and replaces
this operator by the operators of the gradient. So gradients of gradients are right.

Call     torch.autograd.grad(energy, positions, create_graph=True)
Recorded %g = ipu.take_gradients([%energy], [%positions], [], [%one], True, True)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ipu_dynamo.capture.private.subgraphs import example, quote_body, trace_body
from ipu_dynamo.capture.private.tracing import (
    fake_mode_of,
    flatten,
    graph_being_traced,
    is_fake,
    outside_recording,
    pytree,
)
from ipu_dynamo.errors import CompileError, called_from
from ipu_dynamo.ops.marks.inner_gradients import (
    HOOK,
    hook_handles,
    hook_op,
    require_gradient_op,
    take_gradients_op,
)
from ipu_dynamo.ops.private.autograd_engine import run_engine

Values = Sequence[Tensor]
_plain: ContextVar[bool] = ContextVar("autograd runs as it is", default=False)
_require = torch.Tensor.requires_grad_
_assign = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class RequiredGradients(TorchFunctionMode):
    """While entered, tensors of the model of which a gradient is required are marked."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (_require, _assign):
            values = [*args[1:], *kwargs.values()]
            return _mark(func, args[0], bool(values[0]) if values else True)
        if not (isinstance(kwargs.get("requires_grad"), bool) and kwargs["requires_grad"]):
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "requires_grad": False})
        return _mark(_require, made, True) if is_fake(made) else made.requires_grad_()


def _mark(func: Callable[..., Any], tensor: Tensor, required: bool) -> Any:
    if not is_fake(tensor):
        return func(tensor, required)
    if tensor.requires_grad != required:
        require_gradient_op(tensor, required)
    return tensor if func == _require else None


def remove_unread_marks(graph: fx.Graph) -> None:
    """Erase marks of required gradients from a graph where the model takes none."""
    acts = {node.target for node in graph.nodes} & {take_gradients_op, hook_op}
    for node in () if acts else graph.find_nodes(op="call_function", target=require_gradient_op):
        graph.erase_node(node)


@contextmanager
def unrecorded_gradients() -> Iterator[None]:
    """Within the context, let autograd compute gradients, and record its operators."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def record_gradients(
    results: Values,
    tangents: Sequence[Tensor | None],
    retain: bool,
    create: bool,
    inputs: Values,
    allow_unused: bool = False,
    *,
    accumulate_grad: bool = False,
    **_: bool,
) -> tuple[Tensor | None, ...]:
    """Record a call of `torch.autograd.grad`; the arguments are those of autograd's engine.

    Raises:
        CompileError: it is a call of `backward()`, or one of several at once.
    """
    if _plain.get():
        return run_engine(results, inputs, tangents, retain=retain, create=create)
    if accumulate_grad:
        raise CompileError(
            "the model calls backward() in forward, and a program keeps no .grad",
            where=called_from(),
            hint="take the gradient with torch.autograd.grad(loss, inputs, create_graph=True)",
        )
    known_tangents = [tangent for tangent in tangents if tangent is not None]
    if not all(is_fake(tensor) for tensor in (*results, *inputs, *known_tangents)):
        raise CompileError(
            "the model takes gradients in forward for several rows at once",
            where=called_from(),
            hint="take the gradient of a sum over rows: each row's gradient is its own",
        )
    if not any(tensor.requires_grad for tensor in results):
        raise CompileError(
            "the model takes the gradient of what has none: no result of it requires a gradient",
            where=called_from(),
            hint="let inputs require one; in inference, wrap it in torch.enable_grad() in forward",
        )
    with outside_recording():
        known = run_engine(results, inputs, tangents, retain=True, create=False)
    read = [gradient is not None for gradient in known]
    if not allow_unused and not all(read):
        number = read.index(False)
        raise RuntimeError(  # what autograd says
            f"One of the differentiated Tensors (number {number}) appears to not have been used in "
            f"the graph. Set allow_unused=True if this is the desired behavior."
        )
    there = [tensor for tensor, is_read in zip(inputs, read, strict=True) if is_read]
    unread = [tensor for tensor, is_read in zip(inputs, read, strict=True) if not is_read]
    gradients = iter(take_gradients_op(results, there, unread, tangents, retain, create))
    return tuple(next(gradients) if is_read else None for is_read in read)


class _Handle:
    """The result of `register_hook` in a trace."""

    def remove(self) -> None:
        raise CompileError(
            "the model removes a hook in forward, and a program has it from its beginning",
            where=called_from(),
            hint="register the hook only where its change of the gradient is wanted",
        )


def record_hook(tensor: Tensor, function: Callable[[Tensor], Any]) -> _Handle:
    """Record a hook on a tensor of the model as a graph, which becomes part of backward.

    Raises:
        CompileError: the hook returns nothing: its effect would be in Python, outside the graph.
        RuntimeError: the tensor has no gradient.
    """
    if not tensor.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    where, graph = called_from(), graph_being_traced()
    assert graph is not None, "there is no trace"
    quote_body(function)

    def changed(gradient: Tensor) -> tuple[Tensor]:
        result = function(gradient)
        if isinstance(result, Tensor):
            return (result,)
        raise CompileError(
            f"a hook on a tensor inside the model returns {result!r}: what it does with the "
            f"gradient in Python would not run in the compiled program",
            where=where,
            hint="return the changed gradient; look at gradients by Options(anchors=...)",
        )

    with torch.no_grad():
        module, captured = trace_body(changed, [example(fake_mode_of([tensor]), tensor)])
    hook_op(tensor, captured, next(hook_handles))
    next(n for n in reversed(graph.nodes) if n.target is hook_op).meta[HOOK] = module
    return _Handle()


def gradient_and_value(
    function: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    """Compute `torch.func.grad_and_value` by `torch.autograd.grad`."""
    create = torch.is_grad_enabled()
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    with torch.enable_grad():
        own = list(args)
        for number in numbers:
            own[number] = pytree.tree_map_only(Tensor, _of_its_own, own[number])
        result = function(*own, **kwargs)
        value, aux = result if has_aux else (result, None)
        if not isinstance(value, Tensor) or value.dim():
            raise RuntimeError("the function that is differentiated shall return one number")
        leaves, spec = flatten(tuple(own[number] for number in numbers))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        taken = iter(
            torch.autograd.grad(
                value, tensors, create_graph=create, allow_unused=True, materialize_grads=True
            )
        )
        gradients = [next(taken) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if not create:
        value, aux = pytree.tree_map_only(Tensor, Tensor.detach, (value, aux))
    found = pytree.tree_unflatten(gradients, spec)
    first = found[0] if isinstance(argnums, int) else found
    return first, (value, aux) if has_aux else value


def _of_its_own(tensor: Tensor) -> Tensor:
    """A tensor of which the gradient can be taken, and of nothing else."""
    alias = tensor.view_as(tensor)
    return alias if alias.requires_grad else alias.requires_grad_()
