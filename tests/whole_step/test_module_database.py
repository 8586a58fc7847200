"""Check a sample of PyTorch's modules, trained and in inference, between a scale and the loss.

`make test-all` has all modules, with all of their samples.
"""

import pytest

from tests.operator_lists import MODULE_SAMPLES, by_name
from tests.whole_step.database_runs import NotInEagerError
from tests.whole_step.module_database import MODULES, checks

SOME = 9  # one of so many modules is part of the fast tests
FEW = 6  # of the samples of each, evenly chosen, are; some modules have hundreds
MANY = 1000  # samples: all
REFUSED = by_name(MODULE_SAMPLES)


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, FEW, id=name) for name in list(MODULES)[::SOME]),
        *(pytest.param(name, MANY, id=f"{name}-all", marks=pytest.mark.slow) for name in MODULES),
    ],
)
def test_a_module_computes_what_eager_does_or_is_listed(name, count):
    refused, compared = [], 0
    every = list(checks(name, "float32", MANY))
    for check in every[:: max(1, len(every) // count)]:
        try:
            check()
            compared += 1
        except NotInEagerError:
            pass
        except Exception as error:
            if name not in REFUSED or REFUSED[name].message not in str(error):
                raise
            refused.append(error)
    assert compared
    assert bool(refused) == (name in REFUSED)
