"""Check the table that the guide's list of options is made from."""

import pytest
import torch

import poptorch
from poptorch.options import PENDING, Effect, table

TABLE = {line.accessor: line for line in table()}


def test_accessors_are_unique_and_pending_ones_exist():
    assert len(TABLE) == len(table())
    assert {accessor for accessor, line in TABLE.items() if line.pending} == PENDING


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
    ],
)
def test_options_have_their_effects(accessor, effect):
    assert TABLE[accessor].effect is effect


def test_setters_have_a_summary():
    for accessor, line in TABLE.items():
        is_setter = not accessor.startswith("_Popart.") or accessor.startswith("_Popart.set")
        assert bool(line.summary) == is_setter
        assert line.summary.endswith((".", "")[: 1 + (not is_setter)])


@pytest.mark.parametrize(
    ("call", "warned"),
    [
        (lambda o: o.enableStableNorm(True), "enableStableNorm"),
        (lambda o: o.enableStableNorm(False), ""),
        (lambda o: o.Precision.setPartialsType(torch.half), ""),
        (lambda o: o.Precision.setPartialsType(dtype=torch.float), ""),
        (lambda o: o.Precision.enableStochasticRounding(True), ""),
        (lambda o: o._Popart.set("enableStochasticRounding", True), ""),
        (lambda o: o.updatableNamedBuffers(["b"]), ""),
        (lambda o: o.anchorTensor("a", "b"), "anchorTensor"),
        (lambda o: o._Popart.set("partialsChunk", 16), ""),
        (lambda o: o._Popart.set("enableOutlining", True), ""),
        (lambda o: o.deviceIterations(2), ""),
    ],
)
def test_an_option_that_would_change_results_and_does_not_says_so(capsys, call, warned):
    call(poptorch.Options())
    text = capsys.readouterr().err
    assert ("is recorded only" in text) == bool(warned)
    assert warned in text
