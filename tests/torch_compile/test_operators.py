"""Check every operator of PyTorch's database, forward and backward, against eager PyTorch."""

from pathlib import Path

import pytest
import torch._dynamo

from tests.torch_compile.operator_lists import FAILURES, NOT_IN_EAGER, OUTSIDE, UNDEFINED_VALUES
from tests.torch_compile.operators import OPERATORS, NotInEagerError, check

ROOT = Path(__file__).parents[2]
REFUSED = {name: group for group in (*OUTSIDE, *FAILURES) for name in group.names}
SOME = 6  # one of so many operators is part of the fast tests, and so is what is listed


def names() -> list[object]:
    return [
        name
        if name in REFUSED or name in UNDEFINED_VALUES or index % SOME == 0
        else pytest.param(name, marks=pytest.mark.slow)
        for index, name in enumerate(OPERATORS)
    ]


@pytest.fixture(autouse=True)
def captures_recurrent_layers():
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", names())
def test_computes_what_eager_does_or_is_listed(name):
    if name in NOT_IN_EAGER:
        with pytest.raises(NotInEagerError):
            check(name)
    elif name in REFUSED:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - of PyTorch's own types
            check(name)
        assert REFUSED[name].message in str(caught.value), REFUSED[name].reason
    else:
        check(name, values=name not in UNDEFINED_VALUES)


def test_at_least_98_percent_of_what_eager_does_with_static_shapes():
    outside = sum(len(group.names) for group in OUTSIDE)
    total = len(OPERATORS) - len(NOT_IN_EAGER) - outside
    failing = sum(len(group.names) for group in FAILURES)
    assert failing <= 0.02 * total
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
    listed += [name for group in (*OUTSIDE, *FAILURES) for name in group.names]
    assert len(listed) == len(set(listed))
    assert set(listed) <= OPERATORS.keys()
