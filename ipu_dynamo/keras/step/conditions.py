"""Trace `keras.ops.cond` on a tensor: run both branches, select results and writes.

A Python bool, and a tensor that the trace makes of constants alone, take one branch. A gradient
through a condition is the sum over both branches, zero times that of the branch not taken: values
in it that are not finite come through.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from keras import StatelessScope, ops, tree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ipu_dynamo.capture.private.tracing import constant_value, is_fake
from ipu_dynamo.errors import CompileError
from ipu_dynamo.keras.private.stateless_names import (
    backend_core,
    current_scope,
    is_variable,
    mapping_of,
)
from ipu_dynamo.keras.step.step_scope import StepScope
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

Branch = Callable[[], Any]


@contextmanager
def conditions_merged() -> Iterator[None]:
    """Let conditions on tensors run both branches, in this thread."""
    original = backend_core.cond

    def cond(pred: Any, true_fn: Branch, false_fn: Branch) -> Any:
        predicate = pred.value if is_variable(pred) else pred
        if not is_fake(predicate) or predicate.device.type == "meta":
            return original(pred, true_fn, false_fn)
        if (known := constant_value(predicate)) is not None:
            return true_fn() if known.item() else false_fn()
        return _merged(predicate, current_scope(), true_fn, false_fn)

    with replaced(backend_core, "cond", in_this_thread(cond, original)):
        yield


class _BranchScope(StatelessScope):  # type: ignore[misc]
    """A scope of one branch, which knows the variables that it assigns."""

    def __init__(self, outer: StatelessScope | None) -> None:
        super().__init__(
            collect_losses=outer is not None and outer.collect_losses, initialize_variables=False
        )
        if outer is not None:
            mapping_of(self).update(mapping_of(outer))
        self._outer = outer
        self.changed: dict[int, Any] = {}  # variables, by identity

    def assigned(self, variable: Any, value: Any) -> Any:
        """As in the scope of the step: no gradient goes through it, as in eager Keras."""
        if isinstance(self._outer, StepScope | _BranchScope):
            return self._outer.assigned(variable, value)
        return value.detach()

    def add_update(self, update: Any) -> None:
        variable, value = update
        self.changed[id(variable)] = variable
        super().add_update((variable, self.assigned(variable, value)))


def _merged(
    predicate: Tensor, scope: StatelessScope | None, true_fn: Branch, false_fn: Branch
) -> Any:
    taken, otherwise = _BranchScope(scope), _BranchScope(scope)
    with taken, _OwnWrites():
        of_true = true_fn()
    with otherwise, _OwnWrites():
        of_false = false_fn()
    if taken.losses or otherwise.losses:
        raise CompileError(
            "a branch of keras.ops.cond adds a loss",
            hint="return it from both branches, and add it behind the condition",
        )
    where = predicate if predicate.dtype == torch.bool else predicate != 0
    for variable in {**taken.changed, **otherwise.changed}.values():
        if scope is None:
            raise CompileError(
                f"a branch of keras.ops.cond assigns {variable.path}, which no step has",
                hint="make it an attribute of a layer, so that Keras finds it",
            )
        values = [_value(branch, variable) for branch in (taken, otherwise)]
        scope.add_update((variable, torch.where(where, *values)))
    try:
        tree.assert_same_structure(of_true, of_false)
    except (ValueError, TypeError) as error:
        raise _differ(of_true, of_false) from error

    def select(a: Any, b: Any) -> Any:
        if a is None and b is None:
            return None
        if a is None or b is None:
            raise _differ(of_true, of_false)
        a, b = ops.convert_to_tensor(a), ops.convert_to_tensor(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            raise _differ(of_true, of_false)
        return a if a is b else torch.where(where, a, b)

    return tree.map_structure(select, of_true, of_false)


def _value(scope: StatelessScope, variable: Any) -> Any:
    value = scope.get_current_value(variable)
    return variable.value if value is None else value


def _differ(of_true: Any, of_false: Any) -> ValueError:
    """Keras' own error."""

    def kind(value: Any) -> Any:
        shape = getattr(value, "shape", None)
        return value if shape is None else f"{list(shape)} {value.dtype}"

    kinds = [tree.map_structure(kind, value) for value in (of_true, of_false)]
    return ValueError(
        "`true_fn` and `false_fn` should return outputs of the same kind (struct, dtype and "
        f"shape). Got {kinds[0]} and {kinds[1]} instead."
    )


class _OwnWrites(TorchFunctionMode):
    """Refuse writes in place to tensors that were made outside of the branch."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}
        self._outer: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree.flatten((list(args), kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self._made:
                self._outer[id(leaf)] = leaf
        name = getattr(func, "__name__", "")
        writes = name.startswith(("__i", "__set")) or name.rstrip("_") + "_" == name
        before = [tensor._version for tensor in self._outer.values()] if writes else []
        result = func(*args, **kwargs)
        if writes and before != [tensor._version for tensor in self._outer.values()]:
            raise CompileError(
                f"a branch of keras.ops.cond writes in place ({name}) to a tensor that was made "
                "outside of it, which the other branch reads",
                hint="make a new tensor: x = x - y in place of x -= y",
            )
        for leaf in tree.flatten(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self._outer:
                self._made[id(leaf)] = leaf
        return result
