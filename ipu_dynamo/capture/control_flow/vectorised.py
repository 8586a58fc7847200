"""Let a traced model call `torch.vmap`: record the operators on all rows at once.

A trace records operators above the place where `vmap` adds the dimension, and would see those of
one row. So the vectorised function is traced by itself, below that place, and the operators of this
trace are called again in the trace of the model.

Call     torch.vmap(lambda row: row @ self.weight)(%x)
Recorded %y = aten.mm(%x, %weight), and so on
Keeps    values; gradients, which are those of the recorded operators; the line of the call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ipu_dynamo.capture.custom.inner_gradients import gradient_and_value, unrecorded_gradients
from ipu_dynamo.capture.custom.nested_call import NestedCall
from ipu_dynamo.capture.private.tracing import called_again, functional_transforms_replaced
from ipu_dynamo.errors import CompileError, called_from


@contextmanager
def vectorised_calls() -> Iterator[None]:
    """While tracing, record calls of `torch.vmap` and gradients that the model takes by
    `torch.func.grad`; in this thread only. `jvp`, `vjp` and functions made of them are refused."""
    inside = trained = False  # trained: the vectorised function may be differentiated
    where = ""  # the line that vectorises

    def vectorised(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside, trained, where
        if inside:
            return original(*args, **kwargs)
        call = NestedCall(original, args, kwargs)
        inside, trained, where = True, torch.is_grad_enabled(), called_from()
        try:
            results = called_again(lambda *tensors: call(tensors), call.tensors)
        finally:
            inside = False
        return call.rebuilt(results)

    def differentiated(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inside and not trained:
            with unrecorded_gradients():
                return original(*args, **kwargs)
        if name not in ("grad_impl", "grad_and_value_impl") or inside:
            raise CompileError(
                "the model takes a gradient in forward by torch.func.jvp or vjp, or for several "
                "rows at once",
                where=where if inside else called_from(),
                hint="use torch.func.grad or torch.autograd.grad, of a sum over rows",
            )
        found, value = gradient_and_value(*args, **kwargs)
        has_aux: bool = args[2]
        if name == "grad_and_value_impl":
            return found, value
        return (found, value[1]) if has_aux else found

    with functional_transforms_replaced(vectorised, differentiated):
        yield
