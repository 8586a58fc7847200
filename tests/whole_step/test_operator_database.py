"""Check a sample of PyTorch's operators between a trainable scale and the loss, in four types.

`python -m tests.whole_step.operator_database` runs all of them.
"""

import pytest

from tests.whole_step.operator_database import DTYPES, NotInEagerError, check, names_with

SOME = 12  # one of so many operators of each type is looked at here
FEW = 6  # one of so many of these is part of the fast tests
NOT_COMPARED = {  # eager PyTorch cannot do it, or draws numbers; or it takes no dense tensor
    ("float32", "histogramdd"),
    ("float32", "jiterator_unary"),
    ("float32", "scalar_tensor"),
    ("float32", "signal_windows_hann"),
    ("float32", "sparse_sampled_addmm"),
    ("float16", "empty_strided"),
    ("float16", "native_batch_norm"),
    ("float16", "randn_like"),
    ("float16", "_chunk_cat"),
    ("int32", "empty"),
    ("int32", "tril_indices"),
    ("bool", "full"),
    ("bool", "jiterator_binary_return_by_ref"),
}
REFUSED = {  # a part of the error
    ("int32", "corrcoef"): "Python code depends on the value of a tensor",
}
CLOSE = {("float32", "svd_lowrank")}  # it begins with random numbers, and ends close by


def cases():
    for dtype in DTYPES:
        for index, name in enumerate(names_with(dtype)[::SOME]):
            if (dtype, name) in CLOSE:
                continue
            fast = index % FEW == 0 or (dtype, name) in REFUSED
            yield pytest.param(dtype, name, marks=[] if fast else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "name"), list(cases()))
def test_a_step_is_what_eager_does_or_the_operator_is_listed(dtype, name):
    if (dtype, name) in REFUSED:
        with pytest.raises(Exception, match=REFUSED[dtype, name]):  # of PyTorch's own types, too
            check(name, dtype)
    elif (dtype, name) in NOT_COMPARED:
        with pytest.raises(NotInEagerError):
            check(name, dtype)
    else:
        check(name, dtype)
