"""Check a sample of PyTorch's modules, trained and in inference, between a scale and the loss.

`python -m tests.whole_step.module_database` runs all of them.
"""

import pytest

from tests.whole_step.database_runs import NotInEagerError
from tests.whole_step.module_database import MODULES, checks
from tests.whole_step.operator_lists import MODULE_SAMPLES

SOME = 9  # one of so many modules is part of the fast tests
MANY = 100  # samples: all
REFUSED = {name: group for group in MODULE_SAMPLES for name in group.names}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if index % SOME == 0 else pytest.mark.slow)
        for index, name in enumerate(MODULES)
    ],
)
def test_a_module_computes_what_eager_does_or_is_listed(name):
    refused, compared = [], 0
    for check in checks(name, "float32", MANY):
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
