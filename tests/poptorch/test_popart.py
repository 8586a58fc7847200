"""Check the enumerations that programs take from `popart`."""

import pytest

import popart
import poptorch
from poptorch.options import check_session


@pytest.mark.parametrize(
    ("key", "choice"),
    [
        ("accumulateOuterFragmentSettings.schedule", popart.AccumulateOuterFragmentSchedule),
        ("autoRecomputation", popart.RecomputationType),
        ("batchSerializationSettings.batchSchedule", popart.BatchSerializationBatchSchedule),
        ("subgraphCopyingStrategy", popart.SubgraphCopyingStrategy),
        ("syntheticDataMode", popart.SyntheticDataMode),
        ("virtualGraphMode", popart.VirtualGraphMode),
    ],
)
def test_numbers_are_those_that_the_settings_take(key, choice):
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    for member in choice:
        options._Popart.set(key, int(member))
        check_session(options.toDict())


def test_synthetic_data_is_asked_for_by_number():
    options = poptorch.Options()
    options.enableSyntheticData(int(popart.SyntheticDataMode.RandomNormal))
    assert options._Popart.options["syntheticDataMode"] == popart.SyntheticDataMode.RandomNormal
    options.enableSyntheticData(int(popart.SyntheticDataMode.Off))
    assert options._Popart.options["syntheticDataMode"] == popart.SyntheticDataMode.Off


def test_anything_else_says_what_this_module_is():
    with pytest.raises(AttributeError, match="comes with ipu_dynamo") as caught:
        popart.Builder()
    assert all(name in str(caught.value) for name in popart.__all__)
