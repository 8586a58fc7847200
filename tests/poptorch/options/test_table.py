"""Check the table that the guide's list of options is made from."""

import pytest

from poptorch.options import Effect, table

TABLE = {line.accessor: line for line in table()}


def test_accessors_are_unique():
    assert len(TABLE) == len(table())


@pytest.mark.parametrize(
    ("accessor", "effect"),
    [
        ("deviceIterations", Effect.COMPUTES),
        ("setExecutionStrategy", Effect.MACHINE),
        ("logDir", Effect.HOST),
        ("useIpuId", Effect.COMPUTES),
        ("Training.setConvolutionDithering", Effect.RECORDED),
        ("_Popart.enableOutlining", Effect.MACHINE),
        ("_Popart.strictOpVersions", Effect.RECORDED),
        ("_Popart.defaultBufferingDepth", Effect.RECORDED),
    ],
)
def test_options_have_their_effects(accessor, effect):
    assert TABLE[accessor].effect is effect


def test_setters_have_a_summary():
    for accessor, line in TABLE.items():
        is_setter = not accessor.startswith("_Popart.") or accessor.startswith("_Popart.set")
        assert bool(line.summary) == is_setter
        assert line.summary.endswith((".", "")[: 1 + (not is_setter)])
