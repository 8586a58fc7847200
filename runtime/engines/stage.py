"""Name the type of the callables that engines make."""

from collections.abc import Callable, Sequence

from torch import Tensor

# Takes the list of a function's inputs, which it may change; gives the list of its results.
Stage = Callable[[list[Tensor]], Sequence[Tensor | None]]
