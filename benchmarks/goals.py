"""Say which goals for steps a run holds; a goal compares two contenders of a case."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.jax_peer import JAX

EAGER_LIMIT = 1.05  # of eager's time; the better quartile counts, as small steps are noisy


@dataclass(frozen=True, slots=True)
class Goal:
    """Our median time is at most so much of another's.

    Args:
        limit: on a processor with AVX2.
        wide_limit: on one with AVX-512.
    """

    case: str
    other: str
    limit: float
    wide_limit: float


GOALS = (
    Goal("pipeline_adamw", "torch pipelining", 0.95, 0.95),
    Goal("mlp_784", JAX, 0.95, 0.92),
)


def held(timings: Mapping[str, Mapping[str, Any]], *, wide: bool) -> Iterator[str]:
    """A line for each goal of the cases in `timings`.

    Args:
        timings: of each case the contenders' timings as dictionaries; the last one is ours.
        wide: whether the processor has AVX-512.
    """
    for goal in GOALS:
        if "ratio" in (other := timings.get(goal.case, {}).get(goal.other, {})):
            limit = goal.wide_limit if wide else goal.limit
            yield _line(goal.case, goal.other, 1 / other["ratio"], limit, "median")
    for case, contenders in timings.items():
        eager = contenders.get("eager", {})  # where it has as many cores as ours
        if "upper" in eager:
            yield _line(case, "eager", 1 / eager["upper"], EAGER_LIMIT, "lower quartile")


def _line(case: str, other: str, share: float, limit: float, of_what: str) -> str:
    verdict = "holds" if share <= limit else "DOES NOT HOLD"
    return f"{case}: {share:.2f} of the time of {other} ({of_what}), at most {limit}: {verdict}"
