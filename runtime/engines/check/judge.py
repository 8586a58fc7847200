"""Compare what a compiled function computes with the same function operator by operator.

A result passes if it is as near to the reference as rounding brings two right computations. How
near that is follows from the graph, and where that does not say it, from runs of the reference with
moved roundings. What these runs find is in `Spread`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ipu_dynamo.runtime.engines.check import limits
from ipu_dynamo.runtime.engines.check.classes import Class


class FurtherRuns(Protocol):
    """What `runs.Runs` gives."""

    def moved(self, count: int) -> list[list[Any]]: ...

    def wide(self) -> list[Any] | None: ...

    def undefined(self) -> set[int]: ...


@dataclass(frozen=True, slots=True)
class Spread:
    """How far moved runs lie from the reference.

    Args:
        distance: N, the largest finite one.
        kinds: k, elements that differ in being finite, an infinity or NaN.
        integers: m, elements that differ in a result of integers.
    """

    distance: float = 0.0
    kinds: int = 0
    integers: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """A result that no right computation gives.

    Args:
        place: its number; written arguments follow the results.
        problem: how it differs.
    """

    place: int
    problem: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found.

    Args:
        failures: results that are wrong.
        spreads: of the results that needed moved runs, N through M.
        open: results whose reference holds no two values: they say little.
    """

    failures: list[Failure] = field(default_factory=list)
    spreads: dict[int, float] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)


def judge(
    compiled: Sequence[Any],
    expected: Sequence[Any],
    classes: Sequence[Class | None],
    runs: FurtherRuns,
    old: Sequence[Tensor] = (),
) -> Verdict:
    """Compare results, and behind them written arguments.

    Args:
        classes: of all.
        old: what the written arguments held before.
    """
    first_written = len(expected) - len(old)
    failures: dict[int, Failure] = {}
    suspects: list[int] = []
    still_old: list[int] = []
    verdict = Verdict()
    for place, (made, right, of) in enumerate(zip(compiled, expected, classes, strict=True)):
        if of is None or not isinstance(right, Tensor):
            continue
        if problem := _of_type(made, right):
            failures[place] = Failure(place, problem)
            continue
        if of.moves and is_uniform(right):
            verdict.open.add(place)
        if not of.defined:
            continue
        if problem := difference(made, right, of):
            suspects.append(place)
        if place >= first_written and _is_old(made, right, old[place - first_written]):
            still_old.append(place)
    if suspects:
        undefined = runs.undefined()
        suspects = [place for place in suspects if place not in undefined]
    rounded = []
    for place in suspects:
        of = classes[place]
        assert of is not None
        if of.rounded:
            rounded.append(place)
        else:
            problem = difference(compiled[place], expected[place], of)
            failures[place] = Failure(place, problem)
    for count in (limits.MOVED_RUNS, limits.MORE_MOVED_RUNS):
        if rounded:
            moved = runs.moved(count)
            rounded = _unexplained(rounded, compiled, expected, classes, moved, verdict)
    if rounded and (wide := runs.wide()) is not None:
        rounded = _unexplained(rounded, compiled, expected, classes, moved, verdict, wide)
    for place in rounded:
        spread = spread_of(expected[place], [run[place] for run in moved])
        failures[place] = Failure(
            place, difference(compiled[place], expected[place], classes[place], spread)
        )
    for place in still_old:
        if place in failures:
            continue
        before = old[place - first_written]
        changed = ~_same(expected[place], before)
        for run in runs.moved(limits.MOVED_RUNS):
            changed &= ~_same(run[place], before)
        if changed.any() and _same(compiled[place], before)[changed].all():
            failures[place] = Failure(place, "it was not written")
    return replace(verdict, failures=[failures[place] for place in sorted(failures)])


def difference(
    made: Tensor,
    right: Tensor,
    of: Class | None,
    spread: Spread = Spread(),
    wide: Tensor | None = None,
) -> str:
    """How a result differs by more than it may; empty if it does not.

    Args:
        wide: a second reference; an element that is near enough to either passes.
    """
    assert of is not None
    if made.dtype.is_complex:
        made, right = torch.view_as_real(made), torch.view_as_real(right)
        wide = None if wide is None else torch.view_as_real(wide)
    if not made.dtype.is_floating_point:
        wrong = made != right
        if wide is not None:
            wrong &= made != wide
        allowed = limits.OF_MOVED * spread.integers if of.rounded else 0
        return _counted(wrong, made, right) if int(wrong.sum()) > allowed else ""
    if not of.rounded:
        wrong = ~_same(made, right)
        if of.ordered:
            wrong &= ~((made == 0) & (right == 0))
        return _counted(wrong, made, right)
    wrong, kinds = _apart(made, right, spread)
    if wide is not None:
        wrong_too, kinds_too = _apart(made, wide.to(torch.float64), spread)
        wrong, kinds = wrong & wrong_too, kinds & kinds_too
    if int(kinds.sum()) > limits.OF_MOVED * spread.kinds:
        return _counted(kinds, made, right)
    return _counted(wrong, made, right)


def spread_of(right: Tensor, moved: Sequence[Tensor]) -> Spread:
    """How far the results of moved runs lie from the reference."""
    if right.dtype.is_complex:
        right, moved = torch.view_as_real(right), [torch.view_as_real(one) for one in moved]
    if not right.dtype.is_floating_point:
        return Spread(integers=max(int((one != right).sum()) for one in moved))
    distance, kinds = 0.0, 0
    for one in moved:
        both = right.isfinite() & one.isfinite()
        apart = (right.double() - one.double()).abs()[both]
        distance = max(distance, float(apart.max())) if apart.numel() else distance
        kinds = max(kinds, int((_kind(right) != _kind(one)).sum()))
    return Spread(distance, kinds)


def largest(right: Tensor) -> float:
    """M, the largest finite element of a reference."""
    finite = right.double()[right.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def is_sharp(right: Tensor, spread: Spread) -> bool:
    """Whether moved roundings say little about a result, so that a fault in it shows."""
    if not right.dtype.is_floating_point:
        return not spread.integers
    bound = limits.SHARP.get(right.dtype, limits.SHARP_HALF)
    return not spread.kinds and limits.OF_MOVED * spread.distance <= largest(right) / bound


def is_uniform(right: Tensor) -> bool:
    """Whether a reference holds no two values, and so says little."""
    if right.dtype.is_complex:
        right = torch.view_as_real(right)
    if not right.numel():
        return False
    if right.numel() == 1:
        return bool((right == 0) | (right != right))
    values = right.flatten()
    if right.dtype.is_floating_point:
        values = values[~values.isnan()]
    return not values.numel() or bool((values == values[0]).all())


def _unexplained(
    places: Sequence[int],
    compiled: Sequence[Any],
    expected: Sequence[Any],
    classes: Sequence[Class | None],
    moved: Sequence[Sequence[Any]],
    verdict: Verdict,
    wide: Sequence[Any] | None = None,
) -> list[int]:
    """Those of the places that differ by more than moved runs do."""
    left = []
    for place in places:
        right = expected[place]
        spread = spread_of(right, [run[place] for run in moved])
        if right.dtype.is_floating_point and (size := largest(right)):
            verdict.spreads[place] = spread.distance / size
        second = None if wide is None else wide[place]
        if difference(compiled[place], right, classes[place], spread, second):
            left.append(place)
    return left


def _of_type(made: object, right: Tensor) -> str:
    if not isinstance(made, Tensor):
        return "it is missing"
    if made.dtype != right.dtype:
        return f"it has {made.dtype}, and not {right.dtype}"
    if made.shape != right.shape:
        return f"its shape is {tuple(made.shape)}, and not {tuple(right.shape)}"
    return ""


def _apart(made: Tensor, right: Tensor, spread: Spread) -> tuple[Tensor, Tensor]:
    """Which finite elements are too far apart, and which are not finite in the same way."""
    type_ = torch.finfo(made.dtype)
    a, b = made.double(), right.double()
    both = a.isfinite() & b.isfinite()
    allowed = limits.RELATIVE * type_.eps * b.abs()
    allowed += limits.OF_LARGEST * type_.eps * max(largest(right), type_.tiny)
    allowed += limits.OF_MOVED * spread.distance
    return both & ((a - b).abs() > allowed), _kind(a) != _kind(b)


def _kind(values: Tensor) -> Tensor:
    """0 for a finite element, and a number for each infinity and NaN."""
    infinite = values.isinf().to(torch.int8) * values.sign().nan_to_num(0).to(torch.int8)
    return infinite + 3 * values.isnan().to(torch.int8)


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Which elements have the same bits; any NaN is any other."""
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    same = a == b
    if a.dtype.is_floating_point:
        same = (same & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())
    return same


def _is_old(made: Tensor, right: Tensor, old: Tensor) -> bool:
    """Whether an argument holds its old bits wherever the reference changes it."""
    changed = ~_same(right, old)
    return bool(changed.any()) and bool(_same(made, old)[changed].all())


def _counted(wrong: Tensor, made: Tensor, right: Tensor) -> str:
    count = int(wrong.sum())
    if not count:
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    got, want = made[place].item(), right[place].item()
    where = ", ".join(map(str, place))
    return f"{count} of {made.numel()} elements differ: [{where}] is {got}, and not {want}"
