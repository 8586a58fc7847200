"""Check what the options of a model become in its programs, and that no result changes."""

from typing import Any

import keras
import numpy as np
import pytest

from ipu_dynamo.keras import IPUStrategy
from ipu_dynamo.keras.attach.model_state import state_of

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.standard_normal((24, 4)).astype("float32")
Y = RNG.standard_normal((24, 3)).astype("float32")


def trained(**options: Any) -> tuple[Any, list[Any]]:
    """The training program of a pipelined model, and its results."""
    keras.utils.set_random_seed(0)
    with IPUStrategy(num_ipus=2).scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                L.Dense(5, activation="tanh", name="first"),
                L.Dense(5, activation="gelu"),
                L.Dense(3),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=6)
        model.set_pipeline_stage_assignment([0, 1, 1])
        model.set_pipelining_options(3, **options)
        logs = model.fit(X, Y, batch_size=2, epochs=2, shuffle=False, verbose=0).history
        results = model.evaluate(X, Y, batch_size=2, verbose=0)
        programs = {key[0]: p.compiled for key, p in state_of(model).programs.items()}
    return programs, [*model.get_weights(), np.array(results), *map(np.array, logs.values())]


@pytest.fixture(scope="module")
def plain():
    with pytest.MonkeyPatch.context() as patch:  # before the fixture of each test
        patch.setenv("IPU_DYNAMO_ENGINE", "eager")
        return trained()


def _off_chip(program, kind):
    held = {v.off_chip for v in program.variables if v.kind == kind}
    return held == {True}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "holds"),
    [
        ({"offload_weights": True}, lambda p: _off_chip(p, "parameter")),
        ({"offload_gradient_accumulation_buffers": True}, lambda p: _off_chip(p, "accumulator")),
        (
            {"offload_weight_update_variables": True},
            lambda p: any(v.off_chip for v in p.variables if v.kind == "state"),
        ),
        ({"pipeline_schedule": "sequential"}, lambda p: "pipelined" not in p.short()),
        ({"pipeline_schedule": "interleaved"}, lambda p: "pipelined" in p.short()),
        ({"accumulate_outfeed": True}, lambda p: {o.returns for o in p.outputs} == {"final"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_option_acts_and_changes_no_result(plain, options, holds):
    known, expected = plain
    programs, results = trained(**options)
    assert holds(programs["fit"].program)
    assert not holds(known["fit"].program) or options == {"pipeline_schedule": "interleaved"}
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mode", "recompute"),
    [
        ("Auto", "auto"),
        ("RecomputeThenBackpropagate", "stages"),
        ("RecomputeAndBackpropagateInterleaved", "all"),
    ],
)
def test_recomputation_acts_in_every_schedule_and_changes_no_result(plain, mode, recompute):
    programs, results = trained(recomputation_mode=mode, pipeline_schedule="sequential")
    assert programs["fit"].options.recompute == recompute
    assert not programs["fit"].options.recompute_here
    assert ("operators again" in programs["fit"].program.short()) == (mode != "Auto")
    for a, b in zip(results, plain[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_model_without_stages_keeps_states_off_chip_too():
    with IPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), L.Dense(3)])
        model.compile("adam", "mse", steps_per_execution=2)
        model.set_gradient_accumulation_options(2, offload_weight_update_variables=True)
        model.fit(X, Y, batch_size=2, verbose=0)
        (program,) = state_of(model).programs.values()
    states = [v for v in program.compiled.program.variables if v.kind == "state"]
    assert any(v.off_chip for v in states)
