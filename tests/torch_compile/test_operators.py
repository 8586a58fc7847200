"""Check every operator of PyTorch's database, forward and backward, against eager PyTorch."""

from pathlib import Path

import pytest
import torch

from tests.operator_lists import (
    FAILURES_COMPILE,
    FAILURES_TRAINING,
    NOT_IN_EAGER,
    OUTSIDE_COMPILE,
    OUTSIDE_TRAINING,
    UNDEFINED_VALUES,
    by_name,
)
from tests.torch_compile.operators import EVERY, OPERATORS, NotInEagerError, all_captured, check

ROOT = Path(__file__).parents[2]
REFUSED = by_name((*OUTSIDE_COMPILE, *FAILURES_COMPILE))
SOME = 6  # one of so many operators is part of the fast tests, and so is what is listed


def names() -> list[object]:
    return [
        name
        if name in REFUSED or name in UNDEFINED_VALUES or index % SOME == 0
        else pytest.param(name, marks=pytest.mark.slow)
        for index, name in enumerate(OPERATORS)
    ] + [name for name in REFUSED if name not in OPERATORS]


@pytest.fixture(autouse=True)
def captures_all_that_pytorch_can():
    with all_captured():
        yield


@pytest.mark.few(80)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", names())
def test_computes_what_eager_does_or_is_listed(name):
    if name in NOT_IN_EAGER:
        with pytest.raises(NotInEagerError):
            check(name)
    elif name in REFUSED:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - of PyTorch's own types
            check(name, "float32" if name in OPERATORS else "int32")
        assert REFUSED[name].message in str(caught.value), REFUSED[name].reason
    else:
        check(name, values=name not in UNDEFINED_VALUES)


def test_at_least_99_percent_of_what_eager_does_with_static_shapes():
    outside = OPERATORS.keys() & by_name(OUTSIDE_COMPILE)
    total = len(OPERATORS) - len(NOT_IN_EAGER) - len(outside)
    failing = len(by_name(FAILURES_COMPILE))
    assert failing <= 0.01 * total
    pinned = (ROOT / "constraints.txt").read_text()
    if f"torch=={torch.__version__.partition('+')[0]}" not in pinned:
        return  # the page has the figures of that version
    figure = f"{total - failing} of the {total} operators"
    share = f"({(total - failing) / total:.1%})".replace("%", " %")
    page = " ".join((ROOT / "docs" / "torch_compile.md").read_text().split())
    assert figure in page
    assert share in page


def test_lists_name_each_operator_once():
    listed = [*NOT_IN_EAGER, *UNDEFINED_VALUES]
    for groups in (OUTSIDE_COMPILE + FAILURES_COMPILE, OUTSIDE_TRAINING + FAILURES_TRAINING):
        names = listed + [name for group in groups for name in group.names]
        assert len(names) == len(set(names))
        assert set(names) <= EVERY.keys()


def test_both_front_ends_together_refuse_at_most_one_percent_that_has_static_shapes():
    outside = by_name(OUTSIDE_COMPILE).keys() | by_name(OUTSIDE_TRAINING).keys()
    total = EVERY.keys() - set(NOT_IN_EAGER) - outside
    failing = by_name(FAILURES_COMPILE).keys() | by_name(FAILURES_TRAINING).keys()
    assert len(failing) <= 0.01 * len(total)
