"""Name the operators that a program's functions call, and find them by name.

Only operators that PyTorch's dispatcher knows already are found: a name loads nothing, and
operators of TorchScript alone, such as `aten.save`, have none here.
"""

import keyword
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

import ipu_dynamo.ops.accumulate  # registers operators, as all of these do
import ipu_dynamo.ops.control_flow
import ipu_dynamo.ops.library.ctc_beam_search
import ipu_dynamo.ops.library.ctc_loss
import ipu_dynamo.ops.library.host_call
import ipu_dynamo.ops.library.keyed_random
import ipu_dynamo.ops.library.points
import ipu_dynamo.ops.library.replica_collectives
import ipu_dynamo.ops.library.run_executable
import ipu_dynamo.ops.library.suppression
import ipu_dynamo.ops.library.to_int32
import ipu_dynamo.ops.marks.available_memory
import ipu_dynamo.ops.marks.convolution_groups
import ipu_dynamo.ops.marks.detached
import ipu_dynamo.ops.marks.inner_gradients
import ipu_dynamo.ops.marks.markers
import ipu_dynamo.ops.marks.overlap
import ipu_dynamo.ops.marks.print_tensor
import ipu_dynamo.ops.marks.serialized
import ipu_dynamo.ops.marks.step_end
import ipu_dynamo.ops.onednn
import ipu_dynamo.ops.precision.float_check
import ipu_dynamo.ops.precision.half_partial_sums
import ipu_dynamo.ops.precision.stochastic_rounding
import ipu_dynamo.ops.recurrent.onednn_lstm
import ipu_dynamo.ops.recurrent.pairs
import ipu_dynamo.ops.right_decompositions
import ipu_dynamo.ops.serialized_loss
import ipu_dynamo.ops.unread_values
import ipu_dynamo.ops.updates.update_operators  # noqa: F401
from ipu_dynamo.ops.private.graphs import OpOverload, is_registered, schema_of

_PYTHON: dict[str, Callable[..., Any]] = {"getitem": operator.getitem}
_FILES = frozenset({"aten.from_file", "debugprims.load_tensor"})  # they read or make files


def operator_name(target: object) -> str:
    """The name of an operator with its overload, such as `aten.add.Tensor`.

    Raises:
        ValueError: it is nothing that `operator_named` finds.
    """
    if isinstance(target, OpOverload):
        return str(target)
    for name, function in _PYTHON.items():
        if target is function:
            return name
    raise ValueError(f"{target} is no operator that programs name")


def operator_named(name: str) -> Callable[..., Any]:
    """The operator of that name.

    Raises:
        ValueError: this process has no operator of that name, or it reads or makes files.
    """
    if name in _PYTHON:
        return _PYTHON[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if f"{namespace}.{packet}" in _FILES:
        raise ValueError(f"{name} reads or makes files, which programs do not")
    if not overload or not is_registered(
        f"{namespace}::{packet}", overload if overload != "default" else ""
    ):
        raise ValueError(
            f"no operator {name} is registered here; import the module that defines it first"
        )
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def check_arguments(
    target: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Raise ValueError for arguments that `target` does not have, or for one that it misses."""
    if not isinstance(target, OpOverload):
        if len(args) != 2 or kwargs or not isinstance(args[0], fx.Node):
            raise ValueError(f"{operator_name(target)} takes a node and an index")
        return
    _check_names(target, len(args), tuple(kwargs))


@lru_cache(maxsize=4096)  # a program calls few operators in few ways
def _check_names(target: OpOverload, count: int, names: tuple[str, ...]) -> None:
    """Raise ValueError unless `target` takes `count` arguments and those with these names."""
    expected = schema_of(target).arguments
    free = [a.name for a in expected if not a.kwarg_only]
    missing = [
        argument.name
        for position, argument in enumerate(expected)
        if not argument.has_default_value()
        and argument.name not in names
        and (argument.kwarg_only or position >= count)
    ]
    known = {a.name for a in expected} - set(free[:count])
    unknown = [name for name in names if name not in known or keyword.iskeyword(name)]
    if count > len(free):
        raise ValueError(f"{target} takes {len(free)} arguments without a name, not {count}")
    if unknown or missing:
        what = f"has no argument {unknown[0]} left" if unknown else f"needs {missing[0]}"
        raise ValueError(f"{target} {what}; it is {schema_of(target)}")
