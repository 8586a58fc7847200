"""Check that a compiled function which is wrong on one rank runs operator by operator on all.

Ranks are threads of this process, with messages in memory. What is compiled here is the function
itself, with a planted fault.
"""

from dataclasses import replace

import pytest
import torch

from ipu_dynamo.runtime.engines.check import checks as outcomes
from ipu_dynamo.runtime.engines.check.checks import Checks, by_operators
from ipu_dynamo.testing.rank_threads import run_ranks, transport_here
from ipu_dynamo.whole_step import lowering, ranks
from tests.ranks.test_programs_of_one_model import OPTIONS, Dropping, Rank

SEEDED = replace(OPTIONS, seed=3)


class Planted:
    """Compiles functions that are wrong on some ranks, and a little off on the others.

    Args:
        wrong: the ranks.
        call: of each function, the first one with a fault.
    """

    name = "eager"

    def __init__(self, wrong, call=0):
        self.compiled, self.checks = 0, Checks("every" if call else "first")
        here = transport_here()
        self._factor = 2.0 if here is not None and here.share.rank in wrong else 1 + 2.0**-22
        self._call = call

    def compile(self, recipes):
        return [self.checks.checked(recipe, self._stage(recipe)) for recipe in recipes]

    def _stage(self, recipe):
        run, calls = by_operators(recipe.function), []

        def stage(arguments):
            results = run(arguments)
            factor = self._factor if len(calls) >= self._call else 1.0
            calls.append(1)
            return [r * factor if r is not None and r.is_floating_point() else r for r in results]

        return stage


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())


def trained(transport):
    rank = Rank(transport, SEEDED, Dropping)
    rank.train(range(3))
    rank.step.read_optimizer_state()
    states = [t.clone() for of in rank.optimizer.state.values() for t in of.values()]
    return [*rank.weights(), *states], str(rank.step.executable.host_program)


@pytest.mark.few(2)
@pytest.mark.parametrize("call", [0, 2, 4])  # the first one; in the first step; in the second
@pytest.mark.parametrize(("mesh", "wrong"), [((2, 1), {0}), ((2, 2), {0, 1})])
def test_all_ranks_have_the_bits_of_the_operators(mesh, wrong, call, monkeypatch, caplog):
    expected, _ = trained(None)
    monkeypatch.setattr(lowering, "make_engine", lambda *_: Planted(wrong, call))
    for found, host_program in run_ranks(*mesh, trained):
        assert "operator by operator" in host_program
        assert all(map(torch.equal, found, expected))
    assert "computes something else than its operators" in caplog.text


def test_a_failure_that_one_rank_remembers_is_one_of_all(monkeypatch):
    def remembers(of):
        return "failed before" if transport_here().share.rank == 1 else ""

    class Remembering(Planted):
        def compile(self, recipes):
            made = super().compile(recipes)
            known = map(self.checks.failed_before, recipes)
            return [old or new for old, new in zip(known, made, strict=True)]

    expected, _ = trained(None)
    monkeypatch.setattr(outcomes, "_key", lambda recipe: recipe.function.name)
    monkeypatch.setattr(Checks, "_outcome", lambda self, key: remembers(key))
    monkeypatch.setattr(outcomes, "_keep", lambda *_: None)
    monkeypatch.setattr(lowering, "make_engine", lambda *_: Remembering(()))
    for found, _ in run_ranks(2, 1, trained):
        assert all(map(torch.equal, found, expected))
