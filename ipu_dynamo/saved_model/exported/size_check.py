"""Compare the sizes of a call with each other and with the ranges of an exported program."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from ipu_dynamo.saved_model.exported.program_interface import user_inputs
from ipu_dynamo.saved_model.exported.tensor_spec import TensorSpec

_USUAL = 2  # the least size of which PyTorch knows nothing special


def check_sizes(
    program: ExportedProgram, inputs: Mapping[str, TensorSpec], flat: Sequence[Any]
) -> None:
    """Raise ValueError where sizes that are one in the program differ, or are out of its range."""
    described = [value for _, value in user_inputs(program)]
    sizes: dict[Any, tuple[int, str]] = {}
    for name, spec in inputs.items():
        for size, real in zip(
            described[spec.position].shape, flat[spec.position].shape, strict=True
        ):
            if isinstance(size, int):
                continue
            expression = size.node.expr
            if expression.is_Symbol:
                _check_symbol(program, expression, int(real), name, sizes)
    for name, spec in inputs.items():
        for size, real in zip(
            described[spec.position].shape, flat[spec.position].shape, strict=True
        ):
            if isinstance(size, int) or size.node.expr.is_Symbol:
                continue
            expected = size.node.expr.subs({symbol: value for symbol, (value, _) in sizes.items()})
            if expected.is_number and expected != real:
                raise ValueError(
                    f"input {name!r} has shape {list(flat[spec.position].shape)}, and {expected} "
                    f"where it has {real} follows from the other inputs"
                )


def _check_symbol(
    program: ExportedProgram,
    symbol: Any,
    real: int,
    name: str,
    sizes: dict[Any, tuple[int, str]],
) -> None:
    if (limits := program.range_constraints.get(symbol)) is not None and not (
        limits.lower <= real <= limits.upper
    ):
        raise ValueError(f"input {name!r} has a size {real}, not {limits.lower} to {limits.upper}")
    value, first = sizes.setdefault(symbol, (real, name))
    if value != real:
        raise ValueError(f"input {name!r} has a size {real} where input {first!r} has {value}")


def least_sizes(program: ExportedProgram, value: Tensor) -> list[int]:
    """The sizes of an input with the least that a call may choose, 2 where that is allowed."""
    return [
        size if isinstance(size, int) else _least(program, size.node.expr) for size in value.shape
    ]


def _least(program: ExportedProgram, expression: Any) -> int:
    chosen = {}
    for symbol in expression.free_symbols:
        limits = program.range_constraints.get(symbol)
        least = _USUAL if limits is None else max(_USUAL, int(limits.lower))
        chosen[symbol] = least if limits is None else min(least, int(limits.upper))
    return int(expression.subs(chosen))
