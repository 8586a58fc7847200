"""Check what an executor makes of the options that it is given."""

import logging

import pytest
import torch

import poptorch
from ipu_dynamo.optimum import IPUConfig
from poptorch.enums import MeanReductionStrategy, OutputMode
from poptorch.options import adopt, given_options, uses_ipu_model


@pytest.fixture(autouse=True)
def no_model_variables(monkeypatch):
    for name in ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("nothing", [None, {}, 0])
def test_nothing_means_defaults(nothing):
    assert repr(given_options(nothing)) == repr(poptorch.Options())


@pytest.mark.parametrize("wrong", [{"deviceIterations": 2}, "options", torch.optim.SGD])
def test_anything_else_is_refused(wrong):
    with pytest.raises(poptorch.Error, match="Invalid type: 'options' is of type"):
        adopt(wrong, training=True)


def test_an_argument_in_the_wrong_place_is_named():
    model = torch.nn.Linear(2, 2)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(poptorch.Error, match=r"by name, optimizer="):
        poptorch.trainingModel(model, optimizer)
    with pytest.raises(poptorch.Error, match=r"its to_options\(\)"):
        poptorch.inferenceModel(model, IPUConfig())


@pytest.mark.parametrize(("training", "mode"), [(True, OutputMode.Final), (False, OutputMode.All)])
def test_both_sides_are_frozen_and_the_users_mode_stays_open(training, mode):
    options = poptorch.Options()
    own = adopt(options, training=training)
    assert own is not options
    assert options.defaultOutputMode()
    assert own.output_mode == mode
    for frozen in (options, own):
        with pytest.raises(AttributeError, match="frozen"):
            frozen.Training.gradientAccumulation(2)
    assert adopt(options, training=not training).output_mode != mode


def test_a_chosen_mode_stays():
    options = poptorch.Options().outputMode(OutputMode.Sum)
    assert adopt(options, training=True).output_mode == OutputMode.Sum


@pytest.mark.parametrize(
    ("name", "set_count"),
    [
        ("deviceIterations", lambda o, n: o.deviceIterations(n)),
        ("replicationFactor", lambda o, n: o.replicationFactor(n)),
        ("Training.gradientAccumulation", lambda o, n: o.Training.gradientAccumulation(n)),
    ],
)
@pytest.mark.parametrize("count", [0, -1])
def test_counts_start_at_one(name, set_count, count):
    options = poptorch.Options()
    set_count(options, count)
    with pytest.raises(poptorch.Error, match=f"{name} must be at least 1, got {count}"):
        adopt(options, training=True)
    options.modelName("a refusal does not freeze")


def test_an_identical_message_is_repeated_as_often_as_the_options_say(capsys):
    for limit in (2, 3):
        adopt(poptorch.Options().maxRepeatLogs(limit), training=True)
        for _ in range(5):
            logging.getLogger("ipu_dynamo").warning("again")
        assert capsys.readouterr().err.count("again") == limit
    adopt(poptorch.Options().maxRepeatLogs(None), training=True)


def test_inference_does_not_accumulate():
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    adopt(options, training=True)
    with pytest.raises(poptorch.Error, match=r"running a .*inferenceModel.*deviceIterations"):
        adopt(options, training=False)
    sharded = options.clone().setExecutionStrategy(poptorch.ShardedExecution())
    with pytest.raises(poptorch.Error, match="leave it as its default value") as caught:
        adopt(sharded, training=False)
    assert "deviceIterations" not in str(caught.value)


@pytest.mark.parametrize("model_first", [True, False])
def test_an_offline_target_is_no_ipu_model(model_first):
    options = poptorch.Options()
    if model_first:
        options.useIpuModel(True).useOfflineIpuTarget()
    else:
        options.useOfflineIpuTarget().useIpuModel(True)
    with pytest.raises(poptorch.Error, match="useOfflineIpuTarget"):
        adopt(options, training=True)
    adopt(options.useIpuModel(False), training=True)


@pytest.mark.parametrize("variable", ["POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"])
def test_the_option_goes_before_the_environment(monkeypatch, variable):
    assert not uses_ipu_model(poptorch.Options())
    monkeypatch.setenv(variable, "1")
    assert uses_ipu_model(poptorch.Options())
    assert not uses_ipu_model(poptorch.Options().useIpuModel(False))
    with pytest.raises(poptorch.Error, match="useOfflineIpuTarget"):
        adopt(poptorch.Options().useOfflineIpuTarget(), training=False)


@pytest.mark.parametrize(
    ("accum_type", "combined", "expected"),
    [
        (None, False, MeanReductionStrategy.Post),
        (torch.float32, False, MeanReductionStrategy.Post),
        (torch.float16, False, MeanReductionStrategy.Running),
        (torch.float16, True, MeanReductionStrategy.Post),
    ],
)
def test_half_accumulators_average_as_they_go(accum_type, combined, expected, caplog):
    optimizer = poptorch.optim.SGD(
        [torch.zeros(1)], lr=0.1, accum_type=accum_type, use_combined_accum=combined
    )
    name = "meanAccumulationAndReplicationReductionStrategy"
    own = adopt(poptorch.Options(), training=True, optimizer=optimizer)
    assert getattr(own.Training, name) is expected
    assert getattr(adopt(None, training=False, optimizer=optimizer).Training, name) == 1
    for chosen in MeanReductionStrategy:
        options = poptorch.Options()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(chosen)
        own = adopt(options, training=True, optimizer=optimizer)
        running = expected == MeanReductionStrategy.Running
        assert getattr(own.Training, name) is (expected if running else chosen)
        assert ("which was chosen" in caplog.text) == (running and chosen != expected)
        caplog.clear()


@pytest.mark.parametrize("training", [False, True])
def test_an_offline_run_makes_every_executor_offline(training, monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_OFFLINE", "1")
    own = adopt(poptorch.Options(), training=training)
    assert own.connection_type == poptorch.ConnectionType.Never
    assert adopt(poptorch.Options().useOfflineIpuTarget(1), training=training).ipu_version == 1
    with pytest.raises(poptorch.Error, match="cannot be used with the IPU Model"):
        adopt(poptorch.Options().useIpuModel(True), training=training)
