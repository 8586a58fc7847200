"""Let users plan independent convolutions together."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from ipu_dynamo import ConvolutionGroup
from ipu_dynamo.ops.marks.convolution_groups import Plan, Precision
from poptorch.enums import MultiConvPlanType
from poptorch.errors import createPoptorchError, require
from poptorch.tracing import current_trace

_PLANS: dict[MultiConvPlanType, Plan] = {
    MultiConvPlanType.Parallel: "parallel",
    MultiConvPlanType.Serial: "serial",
}
_PARTIALS: dict[torch.dtype, Precision] = {torch.float32: "float", torch.float16: "half"}


class MultiConv:
    """A context: the convolutions inside, which do not depend on each other, become one group.

    Setters return the object, for chaining. A list or tuple has a setting for each convolution, in
    the order of the calls; one value is for all. `partialsTypes` changes half-precision results,
    `planType` and `availableMemoryProportions` are shown in the printed program, for a model of an
    IPU's memory and cycles, and the others are recorded.
    """

    def __init__(self) -> None:
        self._partials: tuple[Precision, ...] = ()
        self._plan_type = MultiConvPlanType.Parallel
        self._memory: tuple[float, ...] = ()
        self._dithering: tuple[bool, ...] = ()
        self._reserved_tiles: int | None = None
        self._cycle_back_off: float | None = None
        self._entered: ConvolutionGroup | None = None

    def availableMemoryProportions(self, value: float | Sequence[float] | None) -> Self:
        """The share of tile memory that each convolution may use for a while.

        Args:
            value: shares in [0, 1); None: the default.

        Raises:
            AssertionError: anything but one or several floats.
            ValueError: a share outside [0, 1).
        """
        given = _each(value)
        floats = value is None or (given and all(isinstance(one, float) for one in given))
        require(floats, "Invalid available memory proportion!")
        if wrong := [one for one in given if not 0 <= one < 1]:
            raise ValueError(f"available memory proportion is {wrong[0]}: choose one in [0, 1)")
        self._memory = given
        return self

    def partialsTypes(self, value: torch.dtype | Sequence[torch.dtype]) -> Self:
        """The type of partial sums: `torch.float` or `torch.half`, for half convolutions.

        Without it, `options.Precision.setPartialsType` decides.

        Args:
            value: one type, or a type for each convolution.

        Raises:
            ValueError: another type.
        """
        given = _each(value)
        if not given or any(one not in _PARTIALS for one in given):
            raise ValueError("Invalid partials types. Expecting torch.float or torch.half")
        self._partials = tuple(_PARTIALS[one] for one in given)
        return self

    def enableConvDithering(self, value: bool | Sequence[bool] | None) -> Self:
        """Whether to start each convolution on another tile; recorded.

        Args:
            value: bools; None: the default.

        Raises:
            ValueError: anything but one or several bools.
        """
        given = _each(value)
        if not all(isinstance(one, bool) for one in given):
            raise ValueError(f"value must be bool or list of bools, got {value!r}")
        self._dithering = given
        return self

    def planType(self, value: MultiConvPlanType | None) -> Self:
        """Whether the convolutions share the tiles, or have all of them in turn.

        Args:
            value: in parallel or one after the other; None: the default, `Parallel`.

        Raises:
            AssertionError: anything but a `MultiConvPlanType`; None is the default, `Parallel`.
        """
        require(value is None or isinstance(value, MultiConvPlanType), "Invalid plan type!")
        self._plan_type = MultiConvPlanType.Parallel if value is None else value
        return self

    def perConvReservedTiles(self, value: int) -> Self:
        """How many tiles to keep for each convolution; recorded.

        Args:
            value: a count of tiles.
        """
        require(isinstance(value, int), f"perConvReservedTiles takes an int, got {value!r}")
        self._reserved_tiles = value
        return self

    def cycleBackOff(self, value: float) -> Self:
        """The share of cycles that a plan may lose for the sake of others; recorded.

        Args:
            value: the share, from 0 to 1.

        Raises:
            AssertionError: no number.
            ValueError: a share outside [0, 1].
        """
        number = isinstance(value, float | int) and not isinstance(value, bool)
        require(number, f"cycleBackOff takes a number, got {value!r}")
        if not 0 <= value <= 1:
            raise ValueError(f"cycleBackOff is {value}: choose a share from 0 to 1")
        self._cycle_back_off = value
        return self

    def __enter__(self) -> Self:
        if current_trace() is not None:
            plan = _PLANS[self._plan_type]
            self._entered = ConvolutionGroup(plan, self._partials, self._count(), self._memory)
            self._entered.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._entered is not None:
            self._entered.__exit__(kind, error, trace)
        self._entered = None

    def _count(self) -> int:
        """How many convolutions the settings are for; 0: any number."""
        settings: dict[str, Sequence[Any]] = {
            "availableMemoryProportions": self._memory,
            "partialsTypes": self._partials,
            "enableConvDithering": self._dithering,
        }
        counts = {name: len(each) for name, each in settings.items() if len(each) > 1}
        if len(set(counts.values())) > 1:
            raise createPoptorchError(
                "poptorch.MultiConv has settings for different numbers of convolutions: "
                + ", ".join(f"{name} for {count}" for name, count in counts.items()),
                id="operator",
            )
        return next(iter(counts.values()), 0)


def _each(value: Any) -> tuple[Any, ...]:
    """The settings of a list or tuple, or the one that was given."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


__all__ = ["MultiConv"]
