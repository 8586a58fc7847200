"""Compare what two checkouts made of a configuration, and print it."""

import difflib
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.against.configurations import Configuration
from benchmarks.against.expected import EXPECTED, Expected, Kind
from benchmarks.measure import Timing

_MEMORY = 1.02  # a peak that grew by more is marked,
_MEMORY_BYTES = 4096  # if it is by more bytes than this
_DIFF_LINES = 16


@dataclass
class Comparison:
    """Results of a configuration in the old checkout, the old one again, and the new one.

    Args:
        old, again, new: answers to `run`.
        timings: of a call, by who ran it, with ratios to that of `old`; none where one raises.
        texts: the graphs of all, by key.
    """

    configuration: Configuration
    old: Mapping[str, Any]
    again: Mapping[str, Any]
    new: Mapping[str, Any]
    timings: Mapping[str, Timing]
    texts: Mapping[str, str] = field(repr=False)
    listed: Sequence[Expected] = EXPECTED

    @property
    def name(self) -> str:
        return self.configuration.name

    @property
    def errors(self) -> dict[str, str]:
        """Errors, by who raised them."""
        answers = {"old": self.old, "old again": self.again, "new": self.new}
        return {who: answer["error"] for who, answer in answers.items() if "error" in answer}

    @property
    def unstable(self) -> list[str]:
        """Kinds that differ between two runs of the old checkout, and can thus show nothing."""
        if self.errors:
            return []
        return [kind for kind in ("graphs", "bits") if self.old[kind] != self.again[kind]]

    @property
    def differences(self) -> dict[Kind, str]:
        """Differences between old and new, in a few words."""
        if self.errors:
            return {}
        found: dict[Kind, str] = {}
        if self.old["graphs"] != self.new["graphs"]:
            gone, come = self._gone_and_come()
            found["graphs"] = f"{gone.total()} graphs gone, {come.total()} new"
        old, new = self.old["bits"], self.new["bits"]
        if kinds := [kind for kind in old | new if old.get(kind) != new.get(kind)]:
            found["states" if kinds == ["states"] else "bits"] = ", ".join(kinds)
        return found

    @property
    def reasons(self) -> dict[Kind, str]:
        """Why a difference is there on purpose, where the list says so."""
        return {
            kind: entry.reason
            for kind in self.differences
            for entry in self.listed
            if entry.covers(self.name, kind)
        }

    @property
    def fails(self) -> bool:
        """Whether something is wrong that no list expects."""
        return bool(self.errors or self.unstable or self.differences.keys() - self.reasons.keys())

    @property
    def peaks(self) -> tuple[int, int] | None:
        """Bytes at the peak of a call, old and new; None where threads make them vary."""
        if self.errors or self.old["peak"] is None:
            return None
        return self.old["peak"], self.new["peak"]

    @property
    def needs_more_memory(self) -> bool:
        old, new = self.peaks or (0, 0)
        return new > old * _MEMORY and new > old + _MEMORY_BYTES

    def row(self) -> str:
        """One line of the table."""
        if self.errors:
            return f"{self.name:<48} RAISES"
        graphs = sum(self.new["graphs"].values())
        words = []
        for column in ("graphs",), ("bits", "states"):
            differing = [kind for kind in column if kind in self.differences]
            word = "DIFFER" if differing else "equal"
            if differing and all(kind in self.reasons for kind in differing):
                word = "expected"
            words.append("UNSTABLE" if column[0] in self.unstable else word)
        memory = "-"
        if self.peaks is not None:
            old, new = self.peaks
            more = " MORE" if self.needs_more_memory else ""
            memory = f"{new / 1024:.0f} KiB" + ("" if old == new else f" ({new / old:.2f}){more}")
        return (
            f"{self.name:<48} {graphs:>3} {words[0]:<9}{words[1]:<9}{memory:<20}"
            f"{1e6 * self.timings['new'].median:8.0f} us "
            f"{self.timings['new'].ratio:5.2f} {self.timings['again'].ratio:5.2f}"
        )

    def details(self) -> str:
        """Differences and errors, with the first lines of a graph that differs."""
        lines = [f"{self.name}: {who} raises {error}" for who, error in self.errors.items()]
        lines += [f"{self.name}: two runs of the old differ in {kind}" for kind in self.unstable]
        for kind, words in self.differences.items():
            reason = f" (expected: {self.reasons[kind]})" if kind in self.reasons else ""
            lines.append(f"{self.name}: {kind} differ: {words}{reason}")
        if "graphs" in self.differences and "graphs" not in self.reasons:
            lines += self._graph_difference()
        return "\n".join(lines)

    def _gone_and_come(self) -> tuple[Counter[str], Counter[str]]:
        old, new = Counter(self.old["graphs"]), Counter(self.new["graphs"])
        return old - new, new - old

    def _graph_difference(self) -> list[str]:
        """The first lines that differ between a graph that is gone and the new one most like it."""
        gone, come = self._gone_and_come()
        if not gone or not come:
            return []
        old = self.texts[next(iter(gone))].splitlines()
        news = [self.texts[key].splitlines() for key in come]
        nearest = min(news, key=lambda new: abs(len(new) - len(old)))
        found = difflib.unified_diff(old, nearest, "old", "new", lineterm="", n=1)
        return [f"    {line[:160]}" for line, _ in zip(found, range(_DIFF_LINES), strict=False)]


HEAD = (
    f"{'front/model/strategy/accumulation/engine':<48} {'#':>3} {'graphs':<9}{'bits':<9}"
    f"{'peak, new (/ old)':<20}{'call, new':>11} {'new':>5} {'again':>5}   (times that of old)"
)


def summary(comparisons: Sequence[Comparison]) -> str:
    """Summarise all comparisons."""
    fine = [c for c in comparisons if not c.errors]
    lines = [f"{len(comparisons)} configurations, {sum(c.fails for c in comparisons)} of them fail"]
    counts = {
        "graphs differ": sum("graphs" in c.differences for c in fine),
        "bits differ": sum("bits" in c.differences for c in fine),
        "bits of the optimiser's state alone differ": sum("states" in c.differences for c in fine),
        "two runs of the old differ": sum(bool(c.unstable) for c in fine),
        "raise": len(comparisons) - len(fine),
        "need more memory": sum(c.needs_more_memory for c in fine),
    }
    lines += [f"  {what}: {count}" for what, count in counts.items()]
    for who, label in (("new", "new beside old"), ("again", "old beside itself")):
        ratios = sorted(c.timings[who].ratio for c in fine)
        first, before = (sum(getattr(c, one)["first"] for c in fine) for one in (who, "old"))
        if ratios:
            lines.append(
                f"  time of a call, {label}: median {statistics.median(ratios):.3f}, "
                f"from {ratios[0]:.2f} to {ratios[-1]:.2f}; "
                f"compiling and three calls: {first:.1f} s beside {before:.1f} s"
            )
    for entry in EXPECTED:
        meant = [c for c in fine if any(entry.covers(c.name, kind) for kind in entry.kinds)]
        if meant and not any(entry.reason in c.reasons.values() for c in meant):
            lines.append(f"  expected, but equal here: {entry.pattern} ({entry.reason})")
    return "\n".join(lines)
