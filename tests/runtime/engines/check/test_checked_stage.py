"""Check that a check changes nothing of a right function, and that a wrong one never runs again."""

import threading

import pytest
import torch

from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.runtime.engines.check import checks as module
from ipu_dynamo.runtime.engines.check import limits
from ipu_dynamo.runtime.engines.check.checks import Checks, by_operators
from ipu_dynamo.testing import assert_same_bits
from ipu_dynamo.tune.artifact_store import CACHE_DIR
from tests.runtime.engines.check.small_functions import checked, faulty, function_of

X = torch.linspace(-2.0, 3.0, 12).view(3, 4)


def add_sine(total, x):
    total.add_(x)
    return (total.sin() + x,)


def test_results_of_a_right_function_go_on_as_they_are():
    function = function_of(add_sine, X, X)
    kept = []

    def run(arguments):
        given = list(arguments)
        arguments.clear()
        kept.append((given, by_operators(function)(list(given))))
        return kept[-1][1]

    stage = checked(function, run)
    total, x = X.clone(), X.clone()
    arguments = [total, x]
    results = stage(arguments)
    (given, made), *more = kept
    assert not more
    assert given[0] is total
    assert results is made
    assert not arguments
    assert_same_bits(total, X + X)
    assert stage.state == "passed"
    names = {"f": stage}
    stage.held_in(names, "f")
    assert names["f"] is run


def test_a_wrong_function_leaves_nothing_and_never_runs_again(caplog):
    function = function_of(add_sine, X, X)
    stage = checked(function, faulty(function, {"sin": lambda r: r * 1.01}))
    names = {"f": stage}
    stage.held_in(names, "f")
    for _ in range(2):
        total = X.clone()
        (result,) = stage([total, X])
        assert_same_bits(total, X + X)
        assert_same_bits(result, (X + X).sin() + X)
    assert names["f"] is not stage
    assert stage.state == "failed"
    (record,) = caplog.records
    assert "@step computes something else than its operators" in record.message
    assert "12 of 12 elements differ" in record.message
    assert "bisect" in record.message


def test_arguments_that_overlap_stay_what_they_were():
    whole = torch.arange(6.0)

    def shift(x, y):
        x.add_(10.0)
        return (y * 2,)

    function = function_of(shift, whole[:4].clone(), whole[2:].clone())
    stage = checked(function, by_operators(function))
    own = whole.clone()
    (result,) = stage([own[:4], own[2:]])
    assert stage.state == "passed"
    assert_same_bits(own, torch.tensor([10.0, 11.0, 12.0, 13.0, 4.0, 5.0]))
    assert_same_bits(result, own[2:] * 2)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_random_numbers_are_those_without_a_check(factor):
    def compute(x):
        return (torch.dropout(x, 0.5, True) + torch.rand_like(x),)

    function = function_of(compute, X)
    torch.manual_seed(3)
    (expected,) = by_operators(function)([X])
    after = torch.rand(3)
    torch.manual_seed(3)
    stage = checked(function, faulty(function, {"add": lambda r: r * factor}))
    (result,) = stage([X])
    assert_same_bits(result, expected)
    assert_same_bits(torch.rand(3), after)
    assert stage.state == ("passed" if factor == 1 else "failed")


def test_an_interrupt_leaves_the_function_unchecked():
    function = function_of(add_sine, X, X)
    right, calls = by_operators(function), []

    def run(arguments):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return right(arguments)

    stage = checked(function, run)
    with pytest.raises(KeyboardInterrupt):
        stage([X.clone(), X])
    assert stage.state == "unchecked"
    stage([X.clone(), X])
    assert stage.state == "passed"


def test_where_both_raise_the_compiled_error_counts_and_a_reference_that_raises_alone_fails():
    def compute(x, i):
        return (x[i] * 1.0,)

    function = function_of(compute, X, torch.tensor([0]))
    beyond = torch.tensor([7])

    def run(arguments):
        arguments.clear()
        return [torch.zeros(1, 4)]

    stage = checked(function, run)
    with pytest.raises(IndexError):
        stage([X, beyond])
    assert stage.state == "failed"
    stage([X, torch.tensor([1])])

    def fails(arguments):
        raise ValueError("compiled")

    with pytest.raises(ValueError, match="compiled"):
        checked(function, fails)([X, beyond])


def test_results_of_one_value_are_compared_in_the_next_calls_alone():
    def compute(x):
        return x.relu(), x.sin()

    function = function_of(compute, X)
    wrong = faulty(function, {"relu": lambda r: r * 2})
    stage = checked(function, wrong)
    stage([-X.abs()])
    assert stage.state == "unchecked"
    assert_same_bits(stage([X])[0], X.relu())
    assert stage.state == "failed"
    stage = checked(function, by_operators(function))
    for _ in range(limits.OPEN_CALLS):
        assert stage.state == "unchecked"
        stage([-X.abs()])
    assert stage.state == "uniform"
    assert "uniform values" in str(stage.decision())


def test_the_plan_gives_the_memory_of_a_check():
    x = torch.linspace(-2.0, 3.0, 1 << 18)
    function = function_of(add_sine, x, x)
    stage = checked(function, by_operators(function))
    stage([x.clone(), x])
    assert " ms, 4.0 MB" in str(stage.decision())  # two copies of `total`, its sine, the sum


def test_one_thread_checks_and_the_others_wait():
    function = function_of(add_sine, X, X)
    stage = checked(function, faulty(function, {"sin": lambda r: r * 2}))
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(stage([X.clone(), X])[0])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert_same_bits(result, (X + X).sin() + X)


def test_every_compares_each_run():
    function = function_of(add_sine, X, X)
    factor = 1.0
    stage = checked(function, faulty(function, {"sin": lambda r: r * factor}), forever=True)
    for _ in range(3):
        stage([X.clone(), X])
    factor = 2.0
    stage([X.clone(), X])
    assert stage.state == "failed"


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_outcome_is_kept_beside_the_code(tmp_path, monkeypatch, factor):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    function = function_of(add_sine, X, X)
    recipe = FunctionRecipe(function, function, "inductor", written=function.written, key="0f")
    run = faulty(function, {"sin": lambda r: r * factor})
    stage = Checks("first").checked(recipe, run)
    stage([X.clone(), X])
    module.forget()  # as in another process
    checks = Checks("first")
    if factor == 1:
        assert checks.failed_before(recipe) is None
        assert checks.checked(recipe, run) is run
    else:
        known = checks.failed_before(recipe)
        assert_same_bits(known([X.clone(), X])[0], (X + X).sin() + X)
        (decision,) = checks.decisions(["step"])
        assert "operator by operator: argument" in str(decision) or "%" in str(decision)
    assert Checks("off").checked(recipe, run) is run
    assert Checks("every").checked(recipe, run) is not run
    module.forget()


def test_a_function_that_needs_too_much_memory_is_not_checked(monkeypatch):
    monkeypatch.setattr(module, "memory_here", lambda: 100)
    function = function_of(add_sine, X, X)
    checks = Checks("first")
    run = by_operators(function)
    assert checks.checked(FunctionRecipe(function, function, "inductor"), run) is run
    assert "not checked: it would take" in str(next(checks.decisions(["step"])))


def test_values_that_cannot_be_compared_run_without_a_check(monkeypatch):
    def refuses(*_):
        raise NotImplementedError("no comparison of this type")

    function = function_of(add_sine, X, X)
    run = by_operators(function)
    stage = checked(function, run)
    monkeypatch.setattr("ipu_dynamo.runtime.engines.check.checked_stage.judge", refuses)
    total = X.clone()
    stage([total, X])
    assert_same_bits(total, X + X)
    assert "not checked: its values cannot be compared" in str(stage.decision())
    names = {"f": stage}
    stage.held_in(names, "f")
    assert names["f"] is run
