"""Run passes in order: check invariants, dump, count, time, and name the pass in every error."""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from time import perf_counter

from ipu_dynamo.options import Choice, OptionError
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.dump import Dump
from ipu_dynamo.passes.invariants import ESTABLISHING, check
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Level, Model, level_of
from ipu_dynamo.profiling import recording
from ipu_dynamo.program.ir.types import counted
from ipu_dynamo.progress import begin

log = logging.getLogger(__name__)
WITHOUT = "IPU_DYNAMO_WITHOUT"  # environment variable: passes to leave out, with commas between


@dataclass(frozen=True, slots=True)
class PassRun:
    """The outcome of a pass.

    Args:
        changed: whether it changed the graph or its annotations, or made a new level.
        before, after: operators.
        entered: whether it was called; if not, it does not apply to the content of the model.
    """

    name: str
    level: Level
    changed: bool
    before: int
    after: int
    seconds: float
    entered: bool = True

    def __str__(self) -> str:
        if not self.entered:
            return f"{self.name}: does not apply"
        count = counted(self.before, "operator")
        if self.before != self.after:
            count = f"{self.before} -> {counted(self.after, 'operator')}"
        what = "" if self.changed else ", nothing to do"
        return f"{self.name}: {count}, {self.seconds * 1e3:.1f} ms{what}"


def summary(runs: Sequence[PassRun]) -> str:
    """Which passes changed something, in a line."""
    names = dict.fromkeys(run.name for run in runs if run.changed)
    return f"{counted(len(runs), 'pass', 'passes')}; changed by {', '.join(names) or 'none'}"


Watch = Callable[[str, Model], None]


@dataclass
class PassManager:
    """Run passes on one model, in one or several calls.

    Args:
        graph: name of the model, for the folder of its dumps.
        first: name of the level before the first pass.
        watch: is called with the model before the first pass, and after each.
        runs: outcomes so far.
        contents: of the model, while `run` runs.
    """

    graph: str
    first: str = "traced"
    watch: Watch | None = None
    runs: list[PassRun] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    dump: Dump | None = None
    contents: Contents = field(init=False)

    def run(self, passes: Sequence[Pass], model: Model) -> Model:
        """Run `passes` on `model`, and return the result.

        Raises:
            Exception: the error of a pass; a note names the pass.
            AssertionError: a pass breaks an invariant of its level.
        """
        if self.dump is None:
            self.dump = Dump.begin(self.graph)
            self._show(self.first, model)
        self.contents = Contents.of(model)
        for number, step in enumerate(passes, 1):
            begin("passes", number, len(passes))
            model = self._run(step, model)
            self._show(step.name, model, step, changed=self.runs[-1].changed)
        return model

    def _show(
        self, name: str, model: Model, step: Pass | None = None, *, changed: bool = True
    ) -> None:
        assert self.dump is not None
        self.dump.write(name, model, step, changed=changed)
        if self.watch is not None:
            self.watch(name, model)

    def _run(self, step: Pass, model: Model) -> Model:
        with recording.span(step.name, "pass", graph=self.graph, level=step.level) as span:
            model = self._run_alone(step, model)
            last = self.runs[-1]
            span.arguments |= {
                "operators": last.after,
                "entered": last.entered,
                "changed": last.changed,
            }
        return model

    def _run_alone(self, step: Pass, model: Model) -> Model:
        start, before = perf_counter(), self.contents
        entered = changed = False
        try:
            if step.level != level_of(model):  # not `assert`, which `python -O` leaves out
                raise AssertionError(f"it takes a {step.level}, not {level_of(model)}")
            if entered := step.applies(model, before):
                result = step(model)
                changed = result if isinstance(result, bool) else result is not model
                model = model if isinstance(result, bool) else result
            self.done.add(step.name)
            if changed or step.name in ESTABLISHING:
                check(model, level_of(model), self.done)
        except Exception as error:
            error.add_note(f"in pass {step.name}")
            raise
        if changed:
            self.contents = Contents.of(model)
        operators = before.operators, self.contents.operators
        seconds = perf_counter() - start
        self.runs.append(PassRun(step.name, step.level, changed, *operators, seconds, entered))
        log.debug("%s", self.runs[-1])
        return model


def without(passes: Sequence[Pass], names: Collection[str], known: Collection[Pass]) -> list[Pass]:
    """`passes` but those that the user leaves out, by `names` or the environment.

    Args:
        known: all passes that there are, also those of other pipelines.

    Raises:
        OptionError: a name that no pass has, or the reason why a pass cannot be left out.
    """
    listed = (name.strip() for name in os.environ.get(WITHOUT, "").split(","))
    wanted = {*names, *filter(None, listed)}
    if not wanted:
        return list(passes)
    reasons = {step.name: step.needed for step in known}
    for name in sorted(wanted):
        if name not in reasons:
            near = get_close_matches(name, reasons, n=3) or sorted(reasons)
            raise OptionError(f"there is no pass {name!r}; did you mean: {', '.join(near)}?")
        if reasons[name]:
            raise OptionError(f"pass {name} cannot be left out: {reasons[name]}")
    return [step for step in passes if step.name not in wanted]


def forced(
    passes: Sequence[Pass], choices: Mapping[str, Choice], known: Collection[Pass]
) -> list[Pass]:
    """`passes`, which decide as the user wants.

    Args:
        choices: by the names of passes.
        known: all passes that there are, also those of other pipelines.

    Raises:
        OptionError: a name that no pass has that decides something, or a choice that it has not.
    """
    if not choices:
        return list(passes)
    open_ = {step.name: step.choices for step in known if step.choices}
    for name, choice in choices.items():
        if name not in open_:
            near = get_close_matches(name, open_, n=3) or sorted(open_)
            raise OptionError(
                f"no pass {name!r} decides anything; did you mean: {', '.join(near)}?"
            )
        if not any(choice is one or (choice == one and type(choice) is str) for one in open_[name]):
            named = ", ".join(map(repr, open_[name]))
            raise OptionError(f"option force has {choice!r} for {name}; choose one of {named}")
    return [_forced(step, choices) for step in passes]


def _forced(step: Pass, choices: Mapping[str, Choice]) -> Pass:
    if step.name not in choices:
        return step
    own, choice = getattr(step, "forced", None), choices[step.name]
    if own is not None and own != choice:
        raise OptionError(
            f"option force has {choice!r} for {step.name}, and another option says {own!r}"
        )
    return replace(step, forced=choice)  # type: ignore[type-var]


def with_pass(passes: Sequence[Pass], new: Pass, *, after: str) -> list[Pass]:
    """Return `passes` with another one inserted after the one that is called `after`."""
    (place,) = (i for i, step in enumerate(passes) if step.name == after)
    return [*passes[: place + 1], new, *passes[place + 1 :]]
