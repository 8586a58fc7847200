"""Check that further runs hold no value longer than they need it."""

import weakref

import torch

from ipu_dynamo.runtime.engines.check.runs import Runs, evaluator
from tests.runtime.engines.check.small_functions import function_of

X = torch.linspace(-2.0, 3.0, 12).view(3, 4)


def compute(x, y):
    z = x.sin()
    w = z.exp() + y
    return w.cos(), w.sum()


def test_values_end_after_their_last_use():
    alive, most = weakref.WeakSet(), []

    def hook(node, call, args, kwargs):
        most.append(len(alive))
        made = call(*args, **kwargs)
        alive.add(made)
        return made

    graph = function_of(compute, X, X).graph.graph
    arguments = [X.clone(), X.clone()]
    alive.update(arguments)
    results = evaluator(graph, hook, {1})(arguments)
    assert not arguments
    assert results[0] is None
    assert torch.equal(results[1], compute(X, X)[1])
    assert most == [2, 2, 2, 1, 1]  # before sin, exp, add, cos, sum; cos is not needed
    assert list(alive) == [results[1]]


def test_moved_runs_give_the_results_of_some_places_and_are_equal_by_number():
    runs = Runs(function_of(compute, X, X), [X, X], None)
    first, second = (runs.moved(3, {1}) for _ in range(2))
    assert first[0] is None
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[1], runs.moved(3, {0, 1})[1])
    assert not torch.equal(runs.moved(3, {0})[0], runs.moved(4, {0})[0])
