"""Compare the sizes of a call with each other and with the ranges of an exported program."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from ipu_dynamo.saved_model.exported.program_interface import user_inputs
from ipu_dynamo.saved_model.files.tensor_spec import TensorSpec

_USUAL = 2  # the least size of which PyTorch knows nothing special
_MOST_SHAPES = 1024


class SizeCheck:
    """The check of the sizes of inputs in one call.

    Invariant: `_passed` holds shapes of all inputs that have passed; comparing symbols is slow.

    Args:
        inputs: by name, with their positions among the flat user inputs of `program`.
    """

    def __init__(self, program: ExportedProgram, inputs: Mapping[str, TensorSpec]) -> None:
        described = [value for _, value in user_inputs(program)]
        self._ranges = program.range_constraints
        self._inputs = {
            name: (spec.position, described[spec.position].shape) for name, spec in inputs.items()
        }
        self._positions = [position for position, _ in self._inputs.values()]
        self._passed: set[tuple[Any, ...]] = set()

    def check(self, flat: Sequence[Any]) -> None:
        """Raise ValueError where sizes that are one in the program differ, or are out of range.

        Args:
            flat: all user inputs, by position, with as many dimensions as the program's.
        """
        key = tuple([flat[position].shape for position in self._positions])
        if key in self._passed:
            return
        self._compare(flat)
        if len(self._passed) < _MOST_SHAPES:
            self._passed.add(key)

    def _compare(self, flat: Sequence[Any]) -> None:
        sizes: dict[Any, tuple[int, str]] = {}
        for name, (position, shape) in self._inputs.items():
            for size, real in zip(shape, flat[position].shape, strict=True):
                if not isinstance(size, int) and size.node.expr.is_Symbol:
                    self._check_symbol(size.node.expr, int(real), name, sizes)
        numbers = {symbol: value for symbol, (value, _) in sizes.items()}
        for name, (position, shape) in self._inputs.items():
            for size, real in zip(shape, flat[position].shape, strict=True):
                if isinstance(size, int) or size.node.expr.is_Symbol:
                    continue
                expected = size.node.expr.subs(numbers)
                if expected.is_number and expected != real:
                    raise ValueError(
                        f"input {name!r} has shape {list(flat[position].shape)}, and {expected} "
                        f"where it has {real} follows from the other inputs"
                    )

    def _check_symbol(
        self, symbol: Any, real: int, name: str, sizes: dict[Any, tuple[int, str]]
    ) -> None:
        limits = self._ranges.get(symbol)
        if limits is not None and not limits.lower <= real <= limits.upper:
            raise ValueError(
                f"input {name!r} has a size {real}, not {limits.lower} to {limits.upper}"
            )
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
