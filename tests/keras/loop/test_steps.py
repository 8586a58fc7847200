"""Check the division of batches into steps and executions."""

import warnings

import pytest

from ipu_dynamo.keras.loop.data.steps import plan_steps


def plan(*, number=None, size=None, per_execution=1, replicas=1):
    return plan_steps(
        argument="steps_per_epoch",
        number=number,
        size=size,
        per_execution=per_execution,
        replicas=replicas,
    )


@pytest.mark.parametrize(
    ("number", "size", "per_execution", "replicas", "steps", "batches_per_execution"),
    [(None, 96, 16, 1, 96, 16), (None, 96, 16, 2, 48, 32), (60, 100, 20, 1, 60, 20)],
)
def test_a_step_is_a_batch_on_every_replica(
    number, size, per_execution, replicas, steps, batches_per_execution
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = plan(number=number, size=size, per_execution=per_execution, replicas=replicas)
    assert (planned.steps, planned.per_execution) == (steps, per_execution)
    assert planned.batches_per_execution == batches_per_execution
    assert planned.batches == steps * replicas
    assert planned.goes_on == (number is not None)


def test_batches_beyond_whole_steps_are_left_out_with_a_warning():
    with pytest.warns(UserWarning, match="11 batches among 4 replicas are 2 steps.* 3 are left"):
        assert plan(size=11, replicas=4).steps == 2


def test_no_whole_step_is_refused():
    with pytest.raises(ValueError, match="3 batches cannot be divided among 4 replicas"):
        plan(size=3, replicas=4)


def test_steps_per_execution_is_reduced_to_the_steps_with_a_warning():
    with pytest.warns(UserWarning, match="steps_per_execution is 8.* 3 steps"):
        assert plan(size=6, per_execution=8, replicas=2).per_execution == 3


def test_steps_are_a_multiple_of_an_execution():
    with pytest.raises(ValueError, match=r"which is 4, must be a divisor .* which is 10"):
        plan(number=10, per_execution=4)


def test_unsized_data_asks_for_the_number_of_steps():
    with pytest.raises(ValueError, match="you must specify the number of steps"):
        plan()


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_of_steps_is_positive(number):
    with pytest.raises(ValueError, match=rf"steps_per_epoch is {number}: give at least 1"):
        plan(number=number, size=4)
