"""Check that poptorch's switch for outlining reaches the core."""

import pytest

import poptorch
from poptorch.translate import core_options


@pytest.mark.parametrize(("setting", "outline"), [(None, "auto"), (True, "auto"), (False, False)])
def test_outlining_can_be_switched_off(setting, outline):
    options = poptorch.Options()
    if setting is not None:
        options._Popart.set("enableOutlining", setting)
    assert core_options(options, training=True).outline == outline
    assert core_options(options, training=False).outline == outline
