"""Compare a compiled function's first runs with the same function operator by operator.

The reference runs first, on copies of the written arguments. Then the compiled function runs on the
arguments themselves. So a right function has the same results and effects as without a check. If
it fails, the arguments get their old values back, and the function runs operator by operator: in
this call, and from then on.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx

from ipu_dynamo.errors import source_line
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.graph_queries import may_draw, writes
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.ops.private.locks import nested_lock
from ipu_dynamo.program import Decision, Function, graph_outputs, make_function
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.runtime.engines.check import limits
from ipu_dynamo.runtime.engines.check.classes import result_classes
from ipu_dynamo.runtime.engines.check.copies import copies_of
from ipu_dynamo.runtime.engines.check.judge import Verdict, judge
from ipu_dynamo.runtime.engines.check.needed_memory import bytes_needed
from ipu_dynamo.runtime.engines.check.runs import Runs
from ipu_dynamo.runtime.engines.stage import Stage

log = logging.getLogger(__name__)
BY = "CheckCompiled"
State = Literal["unchecked", "believed", "passed", "uniform", "failed", "impossible"]
_CANNOT = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
_one_check = nested_lock()  # of all functions: their moments of more memory do not meet


class CheckedStage:
    """A compiled function until its check is over, and then the callable that was chosen.

    Args:
        recipe: how it was compiled.
        run: what was compiled.
        by_operators: makes a callable that runs a function operator by operator.
        settled: is called when the check has an outcome.
        forever: the check is never over, unless it fails.
    """

    def __init__(
        self,
        recipe: FunctionRecipe,
        run: Stage,
        by_operators: Callable[[Function], Stage],
        settled: Callable[["CheckedStage"], None],
        *,
        forever: bool = False,
    ) -> None:
        self.function, self._forever = recipe.function, forever
        self._run, self._by_operators, self._settled = run, by_operators, settled
        self._holders: list[tuple[dict[str, Any], str]] = []
        self._now: Stage | None = None
        self._left = recipe.function  # with the results that are still to be compared
        self._reference: Stage | None = None
        self._calls = 0
        self.state: State = "unchecked"
        self.seconds = 0.0
        self.problem = ""
        self.spreads: dict[int, float] = {}

    @property
    def compiled(self) -> Stage:
        """The compiled function."""
        return self._run

    @property
    def believed(self) -> bool:
        """Whether the compiled function runs without a check."""
        return self._now is self._run

    def believe(self) -> None:
        """Run the compiled function without a check, until `fail` is called."""
        self.state, self._now = "believed", self._run

    def fail(self, problem: str) -> None:
        """Run operator by operator from now on, as another rank has found a wrong result."""
        if self.state != "failed":
            self.problem, plain = problem, self._by_operators(self.function)
            self._warn()
            self._settle("failed", plain)

    def held_in(self, names: dict[str, Any], name: str) -> None:
        """Replace this callable by the chosen one once the check is over."""
        self._holders.append((names, name))
        if self._now is not None:
            names[name] = self._now

    def __call__(self, arguments: list[Tensor]) -> Sequence[Tensor | None]:
        if self._now is None:
            with _one_check:
                if self._now is None:
                    return self._checked(arguments)
        return self._now(arguments)

    def _checked(self, arguments: list[Tensor]) -> Sequence[Tensor | None]:
        began = time.perf_counter()
        function = self._left
        given = list(arguments)
        try:
            before = copies_of(given, function.written)
        except (MemoryError, *_CANNOT) as error:
            return self._given_up(error, arguments)
        draws_some = _draws(self.function.graph.graph)
        random_state = torch.get_rng_state() if draws_some else None
        expected = self._expected(function, before.tensors, random_state)
        self.seconds += time.perf_counter() - began
        results = self._run(arguments)
        began = time.perf_counter()
        verdict = None
        if isinstance(expected, Exception):
            self.problem = f"operator by operator it raises {type(expected).__name__}: {expected}"
        elif expected is not None:
            try:
                verdict = self._judged(
                    function, results, given, expected, before.tensors, random_state
                )
            except (MemoryError, *_CANNOT) as error:  # of a type that few operators take
                self._impossible(error)
        if verdict is not None and verdict.failures:
            self.problem = self._words(function, verdict)
        if self.problem and self.state != "impossible":
            before.write_back()
            if random_state is not None:
                torch.set_rng_state(random_state)
            plain = self._by_operators(self.function)
            self._warn()
            self._settle("failed", plain)
            results = plain(given)
        elif verdict is not None:
            self._passed(verdict)
        self.seconds += time.perf_counter() - began
        return results

    def _given_up(self, error: Exception, arguments: list[Tensor]) -> Sequence[Tensor | None]:
        """Run without a check."""
        self._impossible(error)
        return self._run(arguments)

    def _impossible(self, error: Exception) -> None:
        if not isinstance(error, MemoryError):  # the next call may have more of it
            self.problem = f"its values cannot be compared: {error}"
            log.debug("@%s is not checked", self.function.name, exc_info=error)
            self._settle("impossible", self._run)

    def _expected(
        self, function: Function, before: Sequence[Tensor], random_state: Tensor | None
    ) -> list[Any] | Exception | None:
        """Return the results or the error of the reference; None: there is no memory for it."""
        copied = copies_of(before, function.written).tensors
        try:
            if self._reference is None:
                self._reference = self._by_operators(function)
            results = list(self._reference(list(copied)))
        except MemoryError:
            return None
        except Exception as error:  # an operator may raise any
            return None if "memory" in str(error) else error
        finally:
            if random_state is not None:
                torch.set_rng_state(random_state)
        return [*results, *(copied[place] for place in function.written)]

    def _judged(
        self,
        function: Function,
        results: Sequence[Tensor | None],
        given: Sequence[Tensor],
        expected: Sequence[Any],
        before: Sequence[Tensor],
        random_state: Tensor | None,
    ) -> Verdict:
        made = [
            result if isinstance(node, fx.Node) else None
            for node, result in zip(graph_outputs(function.graph), results, strict=True)
        ]
        written = function.written
        return judge(
            [*made, *(given[place] for place in written)],
            expected,
            result_classes(function),
            Runs(function, before, random_state),
            [before[place] for place in written],
        )

    def _passed(self, verdict: Verdict) -> None:
        self._calls += 1
        self.spreads |= verdict.spreads
        if self._forever:
            return
        if not verdict.open:
            self._settle("passed", self._run)
        elif self._calls == limits.OPEN_CALLS:
            self._settle("uniform", self._run)
        else:
            self._left, self._reference = _only(self._left, verdict.open), None

    def _settle(self, state: State, stage: Stage) -> None:
        self.state, self._now = state, stage
        for names, name in self._holders:
            names[name] = stage
        if state != "impossible":
            self._settled(self)

    def decision(self) -> Decision:
        """Return the outcome of the check."""
        name = self.function.name
        if self.state == "failed":
            return Decision(BY, "operator by operator", self.problem, name)
        if self.state == "impossible":
            return Decision(BY, "not checked", self.problem, name)
        if self.state == "unchecked":
            reason = "compared at each run" if self._forever else "it is compared when it runs"
            return Decision(BY, "not checked yet", reason, name)
        uniform = " on uniform values" if self.state == "uniform" else ""
        largest = max(self.spreads.values(), default=0.0)
        moved = f"; roundings move it by {largest:.2g} of its size" if largest else ""
        took = f"{1e3 * self.seconds:.1f} ms, {bytes_needed(self.function) / 2**20:.1f} MB"
        return Decision(BY, f"checked{uniform}", took + moved, name)

    def _words(self, function: Function, verdict: Verdict) -> str:
        failure = verdict.failures[0]
        outputs = graph_outputs(function.graph)
        if failure.place < len(outputs):
            node = outputs[failure.place]
            what = f"%{node.name} ({source_line(node)})"
        else:
            place = function.written[failure.place - len(outputs)]
            what = f"argument {place}, which it writes"
        others = len(verdict.failures) - 1
        return f"{what}: {failure.problem}" + (f"; {others} more results" if others else "")

    def _warn(self) -> None:
        log.warning(
            "compiled @%s computes something else than its operators, and runs operator by "
            "operator from now on, in this call, too. %s\n"
            "  try:  ipu_dynamo.bisect(model, *inputs, training=True), or training=False for "
            "inference, finds the operator; the compiler has a fault there",
            self.function.name,
            self.problem,
        )


def plain(stage: Stage) -> Stage:
    """Return the compiled function, whether or not it has been checked."""
    return stage.compiled if isinstance(stage, CheckedStage) else stage


def believed(stage: Stage) -> bool:
    """Whether a compiled function runs without a check."""
    return not isinstance(stage, CheckedStage) or stage.believed


def _draws(graph: fx.Graph) -> bool:
    return any(
        may_draw(node) or any(_draws(body.graph.graph) for body in bodies_of(node))
        for node in graph.nodes
    )


def _only(function: Function, places: set[int]) -> Function:
    """Copy a function with only some of its results; it takes and writes the same arguments."""
    graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in function.graph.graph.nodes:
        if node.op != "output":
            of[node] = graph.node_copy(node, of.__getitem__)
    graph.output(
        tuple(
            of[node] if place in places and isinstance(node, fx.Node) else None
            for place, node in enumerate(graph_outputs(function.graph))
        )
    )
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or writes(node))
    return make_function(function.name, module_of(graph, function.graph))
