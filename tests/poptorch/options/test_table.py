"""Check the table that the guide's list of options is made from."""

import pytest
import torch

import poptorch
from poptorch.options import PENDING, Effect, effects, table

TABLE = {line.accessor: line for line in table()}


def test_accessors_are_unique_and_pending_ones_exist():
    assert len(TABLE) == len(table())
    assert {accessor for accessor, line in TABLE.items() if line.waits_for} == PENDING.keys()


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
        (lambda o: o.logCycleCount(True), "logCycleCount"),
        (lambda o: o.logCycleCount(False), ""),
        (lambda o: o.enableStableNorm(True), ""),
        (lambda o: o.Precision.setPartialsType(torch.half), ""),
        (lambda o: o.Precision.setPartialsType(dtype=torch.float), ""),
        (lambda o: o.Precision.enableStochasticRounding(True), ""),
        (lambda o: o._Popart.set("enableStochasticRounding", True), ""),
        (lambda o: o.updatableNamedBuffers(["b"]), ""),
        (lambda o: o.anchorTensor("a", "b"), ""),
        (lambda o: o._Popart.set("partialsChunk", 16), ""),
        (lambda o: o._Popart.set("enableOutlining", True), ""),
        (lambda o: o.deviceIterations(2), ""),
        (lambda o: o.enableExecutableCaching("cache"), ""),
        (lambda o: o.enableExecutableCaching(None), ""),
        (lambda o: o.setAvailableMemoryProportion({"IPU0": 0.3}), "setAvailableMemoryProportion"),
        (lambda o: o._Popart.set("syntheticDataMode", 2), ""),
    ],
)
def test_an_option_whose_effect_is_to_come_says_so_once(capsys, monkeypatch, call, warned):
    monkeypatch.setattr(effects, "_said", set())
    call(poptorch.Options())
    call(poptorch.Options())
    text = capsys.readouterr().err
    assert text.count("is recorded only: its effect waits for ") == bool(warned)
    assert warned in text
