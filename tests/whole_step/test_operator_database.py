"""Check a sample of PyTorch's operators between a trainable scale and the loss, in four types.

`python -m tests.whole_step.operator_database` runs all of them.
"""

import pytest

from tests.operator_lists import (
    FAILURES_TRAINING,
    OUTSIDE_TRAINING,
    RANDOM_BEGINNINGS,
    by_name,
)
from tests.whole_step.database_runs import NotInEagerError
from tests.whole_step.operator_database import DTYPES, OPERATORS, check, names_with

SOME = 12  # one of so many operators of each type is looked at here
FEW = 6  # one of so many of these is part of the fast tests
NOT_COMPARED = {  # eager PyTorch cannot do it, or draws numbers; or it takes no dense tensor
    ("float32", "jiterator_unary"),
    ("float32", "scalar_tensor"),
    ("float32", "signal_windows_hann"),
    ("float32", "sparse_sampled_addmm"),
    ("float16", "empty_strided"),
    ("float16", "native_batch_norm"),
    ("float16", "randn_like"),
    ("int32", "empty"),
    ("int32", "tril_indices"),
    ("bool", "full"),
    ("bool", "jiterator_binary_return_by_ref"),
}
MANY = 12  # samples of an operator that is listed: one of them is refused
REFUSED = by_name((*OUTSIDE_TRAINING, *FAILURES_TRAINING))


def cases():
    for dtype in DTYPES:
        for index, name in enumerate(names_with(dtype)[::SOME]):
            if name in RANDOM_BEGINNINGS or name in REFUSED:
                continue
            fast = index % FEW == 0
            yield pytest.param(dtype, name, marks=[] if fast else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "name"), list(cases()))
def test_a_step_is_what_eager_does_or_the_operator_is_listed(dtype, name):
    if (dtype, name) in NOT_COMPARED:
        with pytest.raises(NotInEagerError):
            check(name, dtype)
    else:
        check(name, dtype)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_listed_is_refused_for_its_reason(name):
    dtypes = ("float32",) if REFUSED[name] in FAILURES_TRAINING else ("int32", "float32")
    dtype = next(dtype for dtype in dtypes if name in names_with(dtype))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of PyTorch's own types, too
        check(name, dtype, count=MANY)
    assert REFUSED[name].message in str(caught.value), REFUSED[name].reason


def test_at_most_one_percent_is_refused_that_has_static_shapes():
    names = set(OPERATORS) - by_name(OUTSIDE_TRAINING).keys()
    assert len(by_name(FAILURES_TRAINING)) <= 0.01 * len(names)
    assert REFUSED.keys() <= set(OPERATORS)
