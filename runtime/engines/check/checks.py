"""Decide which compiled functions are checked, and keep the outcomes next to their code."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import torch

from ipu_dynamo.options.checks import check_choice
from ipu_dynamo.program import Decision, Function
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.runtime.engines.check import limits
from ipu_dynamo.runtime.engines.check.checked_stage import BY, CheckedStage
from ipu_dynamo.runtime.engines.check.classes import why_unchecked
from ipu_dynamo.runtime.engines.check.needed_memory import bytes_needed, memory_here
from ipu_dynamo.runtime.engines.eager_code import eager_code
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.tune.artifact_store import StageStore, open_store

log = logging.getLogger(__name__)
CHECK = "IPU_DYNAMO_CHECK_COMPILED"  # environment variable: the choice for `auto`
CHOICES = ("first", "every", "off")
_JUDGING = ("classes", "judge", "limits", "roundings", "runs")  # the files that decide
_known: dict[str, str] = {}  # outcomes in this process, by key


def choose_check(check: str) -> str:
    """Return `check`; for `auto` the choice of the environment, else `first`.

    Raises:
        OptionError: the environment has none of the choices.
    """
    if check == "auto":
        check = os.environ.get(CHECK) or "first"
        check_choice(CHECK, check, CHOICES)
    return check


class Checks:
    """The checks of the functions that an engine compiles.

    Args:
        check: `first`, `every` or `off`; `auto` is the environment's choice, else `first`.

    Attributes:
        stages: callables of the functions that were not checked before.
        reports: failures that other ranks do not know yet: the problem of each function.
    """

    def __init__(self, check: str = "auto") -> None:
        self.check = choose_check(check)
        self.stages: list[CheckedStage] = []
        self._other: list[Decision] = []
        self.reports: dict[str, str] = {}
        self._failed = set[str]()
        self._agrees, self._judges = False, True
        self._known_to_all: dict[str, str] = {}  # failures, as `reports`

    def agree(self, *, judges: bool) -> None:
        """Let ranks have the same outcomes from now on: functions may fail later, by `take`.

        Args:
            judges: compare functions here, and not on another rank.
        """
        self._agrees, self._judges = True, judges or self.check == "every"

    def take(self, failures: Mapping[str, str]) -> None:
        """Run functions operator by operator that failed on any rank, which has told all.

        Args:
            failures: the `reports` of all ranks.
        """
        self._known_to_all |= failures
        for stage in self.stages:
            if problem := failures.get(_name(stage.function)):
                stage.fail(problem)
        self.reports = {name: it for name, it in self.reports.items() if name not in failures}

    def failed_before(self, recipe: FunctionRecipe) -> Stage | None:
        """Return an operator-by-operator callable if the function failed a check before."""
        if self.check == "off":
            return None
        problem = self._known_to_all.get(_name(recipe.function), "")
        if not problem and (key := _key(recipe)):
            state, _, problem = self._outcome(key).partition(" ")
            if state != "failed":
                return None
            self._note(recipe.function, problem)
        if not problem:
            return None
        self._failed.add(_name(recipe.function))
        reason = f"{problem} (found before)"
        name = recipe.function.name
        self._other.append(Decision(BY, "operator by operator", reason, name))
        log.warning("@%s runs operator by operator: compiled, it was wrong: %s", name, problem)
        return by_operators(recipe.function)

    def checked(self, recipe: FunctionRecipe, run: Stage) -> Stage:
        """Return a callable that compares the first runs, unless these were compared before."""
        if self.check == "off":
            return run
        key, function = _key(recipe), recipe.function
        believes, reason = bool(key and self.check == "first" and self._outcome(key)), ""
        if not believes:
            reason = why_unchecked(function.graph.graph) or _too_large(function)
            if not reason and not self._judges:
                reason = "ranks with replica 0 compare it"
        if reason:
            self._other.append(Decision(BY, "not checked", reason, function.name))
        believes |= bool(reason)
        if believes and not self._agrees:
            return run

        def settled(stage: CheckedStage) -> None:
            if key:
                _keep(key, f"{stage.state} {stage.problem}".strip())
            if stage.state == "failed":
                self._failed.add(_name(function))
                self._note(function, stage.problem)

        forever = self.check == "every"
        stage = CheckedStage(recipe, run, by_operators, settled, forever=forever)
        if believes:
            stage.believe()
        self.stages.append(stage)
        return stage

    def fails(self, function: Function) -> bool:
        """Whether a compiled function was found wrong, so that it runs operator by operator."""
        return _name(function) in self._failed

    def _note(self, function: Function, problem: str) -> None:
        if self._agrees and _name(function) not in self._known_to_all:
            self.reports[_name(function)] = problem

    def decisions(self, functions: Sequence[str]) -> Iterator[Decision]:
        """Yield the outcomes of the checks of some functions."""
        for decision in self._other:
            if decision.function in functions:
                yield decision
        for stage in self.stages:
            if stage.function.name in functions and stage.state != "believed":
                yield stage.decision()

    def _outcome(self, key: str) -> str:
        if key not in _known:
            store = _store()
            _known[key] = store.read_outcome(key) if store else ""
        return _known[key]


def by_operators(function: Function) -> Stage:
    """Return a callable that runs a function and the bodies of its loops operator by operator."""
    return eager_code(function.graph.graph)


def _name(function: Function) -> str:
    """The name of a function that all ranks use for it."""
    return f"{function.name} {function.code_key}"


def forget() -> None:
    """Drop this process's memory of earlier checks."""
    _known.clear()


def _key(recipe: FunctionRecipe) -> str | None:
    """A digest of the machine code, the function and the check; None: the code has no key."""
    codes = [part.key for part in recipe.compiled_parts]
    if not codes or not all(codes):
        return None
    parts = [limits.VERSION, recipe.function.code_key, _this_check(), *codes]
    return sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _keep(key: str, outcome: str) -> None:
    _known[key] = outcome
    try:
        if store := _store():
            store.write_outcome(key, outcome)
    except OSError as error:  # a full disk: it is checked again
        log.warning("what came of a check cannot be kept: %s", error)


def _store() -> StageStore | None:
    return None if torch.compiler.config.force_disable_caches else open_store()


def _too_large(function: Function) -> str:
    needed, here = bytes_needed(function), memory_here()
    if needed <= limits.MEMORY_SHARE * here:
        return ""
    return f"it would take {needed >> 20} MB, more than {limits.MEMORY_SHARE:.0%} of {here >> 20}"


def _this_check() -> str:
    """A digest of the sources that judge."""
    global _digest
    if not _digest:
        folder = Path(__file__).parent
        files = [folder / f"{name}.py" for name in _JUDGING]
        _digest = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return _digest


_digest = ""
