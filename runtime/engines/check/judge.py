"""Compare the results of a compiled function with the same function operator by operator.

A result passes if it is as near to the reference as rounding brings two right computations. This
distance follows from the graph, or else from runs of the reference with moved roundings. `Spread`
holds the results of these runs.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from operator import and_
from typing import Any, Protocol

import torch
from torch import Tensor

from ipu_dynamo.runtime.engines.check import limits
from ipu_dynamo.runtime.engines.check.classes import Class

_NEARLY_ALL = 1 - 2**-20  # of a limit, for distances that are rounded
_ELEMENTS = 1 << 16  # of a part: temporaries of some megabytes, and little time for the calls


class FurtherRuns(Protocol):
    """What `runs.Runs` gives."""

    def moved(self, number: int, places: Container[int]) -> list[Any]: ...

    def wide(self, places: Container[int]) -> list[Any] | None: ...

    def undefined(self) -> set[int]: ...


@dataclass(frozen=True, slots=True)
class Spread:
    """The distances of moved runs from the reference.

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
    """The outcome of a comparison.

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
    """Compare results, and after them written arguments.

    Args:
        classes: of all.
        old: the values of the written arguments before the call.
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
    # The reference's changes of an argument, where all moved runs change it in the same way. At
    # other places, a right result may be the old value.
    changes = {
        place: _change(expected[place], old[place - first_written])
        for place in still_old
        if place not in failures
    }
    spreads = dict.fromkeys(rounded, Spread())
    # The limits grow with each run. So where the first run explains a result, all would.
    for first, end in pairwise((0, 1, limits.MOVED_RUNS, limits.MORE_MOVED_RUNS)):
        for number in range(first, end) if rounded or changes else ():
            moved = runs.moved(number, {*rounded, *changes})
            for place in rounded:
                spreads[place] = spread_of(expected[place], moved[place], spreads[place])
            for place, change in changes.items():
                change[change != _change(moved[place], old[place - first_written])] = 0
            del moved  # before the next run
        rounded = _unexplained(rounded, compiled, expected, classes, spreads, verdict)
        changes = {
            place: change
            for place, change in changes.items()
            if change.any()
            and not _change(compiled[place], old[place - first_written])[change != 0].any()
        }
    if rounded and (wide := runs.wide(set(rounded))) is not None:
        rounded = _unexplained(rounded, compiled, expected, classes, spreads, verdict, wide)
    for place in rounded:
        problem = difference(compiled[place], expected[place], classes[place], spreads[place])
        failures[place] = Failure(place, problem)
    for place in changes:
        failures.setdefault(place, Failure(place, "it was not written"))
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
    references = [right] if wide is None else [right, wide]
    sizes = [largest(one) if _is_near(made, of) else 0.0 for one in references]
    far, kinds = _Differing(), _Differing()
    for part, *others in slices_of(made, *references):
        if sizes[0] and _surely_near(part, others[0], spread, sizes[0]):
            far.pass_over(part)
            kinds.pass_over(part)
            continue
        wrong = [_wrong(part, one, of, spread, m) for one, m in zip(others, sizes, strict=True)]
        far.add(reduce(and_, (one for one, _ in wrong)))
        kinds.add(reduce(and_, (one for _, one in wrong)))
    if kinds.count > limits.OF_MOVED * spread.kinds:
        return kinds.words(made, right)
    return far.words(made, right) if far.count > limits.OF_MOVED * spread.integers else ""


def spread_of(right: Tensor, moved: Tensor, before: Spread = Spread()) -> Spread:
    """Return the distance of a moved run's result from the reference.

    Args:
        before: of the runs before it, which it joins.
    """
    if right.dtype.is_complex:
        right, moved = torch.view_as_real(right), torch.view_as_real(moved)
    distance, kinds, integers = before.distance, 0, 0
    for a, b in slices_of(right, moved):
        if not right.dtype.is_floating_point:
            integers += int((a != b).sum())
            continue
        if math.isfinite(farthest := _farthest(a, b)):
            distance = max(distance, farthest)
            continue
        both = a.isfinite() & b.isfinite()
        differences = (a.double() - b.double()).abs()[both]
        distance = max(distance, float(differences.max())) if differences.numel() else distance
        kinds += int((_kind(a) != _kind(b)).sum())
    return Spread(distance, max(before.kinds, kinds), max(before.integers, integers))


def largest(right: Tensor) -> float:
    """M, the largest finite element of a reference."""
    size = 0.0
    for (part,) in slices_of(right):
        if part.numel() and math.isfinite(most := float(part.abs().max())):
            size = max(size, most)
            continue
        finite = part.double()[part.isfinite()].abs()
        size = max(size, float(finite.max())) if finite.numel() else size
    return size


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
    first = None
    for (part,) in slices_of(right):
        values = part[part == part]  # NaN aside
        if values.numel():
            first = values[0] if first is None else first
            if not (values == first).all():
                return False
    return True


def _unexplained(
    places: Sequence[int],
    compiled: Sequence[Any],
    expected: Sequence[Any],
    classes: Sequence[Class | None],
    spreads: Mapping[int, Spread],
    verdict: Verdict,
    wide: Sequence[Any] | None = None,
) -> list[int]:
    """Those of the places that differ by more than moved runs do."""
    left = []
    for place in places:
        right, spread = expected[place], spreads[place]
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


def _is_near(made: Tensor, of: Class) -> bool:
    """Whether a result may be near the reference, and need not have its bits."""
    return of.rounded and made.dtype.is_floating_point


def _farthest(a: Tensor, b: Tensor) -> float:
    """The largest distance of two elements, rounded; not finite if an element is not."""
    if a.dtype.itemsize < 4:
        a, b = a.float(), b.float()
    return float((a - b).abs_().max()) if a.numel() else 0.0


def _surely_near(made: Tensor, right: Tensor, spread: Spread, size: float) -> bool:
    """Whether all elements are so near that the part of the limit for the largest one is enough.

    It takes a few passes over the memory, where `_wrong` takes twenty.
    """
    allowed = limits.OF_LARGEST * torch.finfo(made.dtype).eps * size
    allowed += limits.OF_MOVED * spread.distance
    return _farthest(made, right) <= _NEARLY_ALL * allowed


def _wrong(
    made: Tensor, right: Tensor, of: Class, spread: Spread, size: float
) -> tuple[Tensor, Tensor]:
    """Return the elements that differ too much, and those that are not finite in the same way.

    Args:
        size: M of the whole reference.
    """
    if not _is_near(made, of):
        wrong = ~_same(made, right)
        if of.ordered:
            wrong &= ~((made == 0) & (right == 0))
        return wrong, torch.zeros_like(wrong)
    type_ = torch.finfo(made.dtype)
    a, b = made.double(), right.double()
    both = a.isfinite() & b.isfinite()
    allowed = limits.RELATIVE * type_.eps * b.abs()
    allowed += limits.OF_LARGEST * type_.eps * max(size, type_.tiny)
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


def _change(new: Tensor, old: Tensor) -> Tensor:
    """How each element changes: 0 not at all, 1 upwards, -1 downwards, 2 to or from NaN, or only
    in its sign."""
    same = _same(new, old)
    if new.dtype.is_complex:
        new, old = torch.view_as_real(new), torch.view_as_real(old)
    change = (new > old).to(torch.int8) - (new < old).to(torch.int8)
    return change.masked_fill_(~same & (change == 0), 2)


def _is_old(made: Tensor, right: Tensor, old: Tensor) -> bool:
    """Whether an argument holds its old bits wherever the reference changes it."""
    some = False
    for of_made, of_right, of_old in slices_of(made, right, old):
        changed = ~_same(of_right, of_old)
        if changed.any():
            some = True
            if not _same(of_made, of_old)[changed].all():
                return False
    return some


@dataclass(slots=True)
class _Differing:
    """The elements of a result that differ, counted slice by slice.

    Args:
        first: the number of the first.
        seen: elements of the slices until now.
    """

    count: int = 0
    first: int = 0
    seen: int = 0

    def add(self, wrong: Tensor) -> None:
        count = int(wrong.sum())
        if count and not self.count:
            self.first = self.seen + int(wrong.flatten().nonzero()[0])
        self.count += count
        self.seen += wrong.numel()

    def pass_over(self, part: Tensor) -> None:
        """Count a slice whose elements do not differ."""
        self.seen += part.numel()

    def words(self, made: Tensor, right: Tensor) -> str:
        """Empty if there are none."""
        if not self.count:
            return ""
        place = [int(i) for i in torch.unravel_index(torch.tensor(self.first), made.shape)]
        got, want = made[tuple(place)].item(), right[tuple(place)].item()
        where = ", ".join(map(str, place))
        return f"{self.count} of {made.numel()} elements differ: [{where}] is {got}, and not {want}"


def slices_of(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Views of tensors of one shape, some elements of each, in the order of the elements.

    Raises:
        ValueError: if the shapes differ.
    """
    shape = tensors[0].shape
    if any(tensor.shape != shape for tensor in tensors):
        raise ValueError("results of two runs have different shapes")
    if tensors[0].numel() <= _ELEMENTS:
        yield tensors
        return
    inner = shape[1:].numel()
    length = max(1, _ELEMENTS // inner)
    for start in range(0, shape[0], length):
        parts = [tensor[start : start + length] for tensor in tensors]
        if inner > _ELEMENTS:
            yield from slices_of(*(part[0] for part in parts))
        else:
            yield parts
