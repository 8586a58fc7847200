"""Check the answers about hardware, for which virtual IPUs stand in."""

import pytest

import poptorch
from poptorch import hardware

VARIABLES = (
    "IPU_DYNAMO_HARDWARE",
    "POPTORCH_IPU_MODEL",
    "POPTORCH_IPU_MODEL_VERSION",
    "POPTORCH_SMALL_IPU_MODEL",
)


@pytest.fixture
def environment(monkeypatch):
    """An environment that says nothing about hardware, to be added to."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


@pytest.mark.parametrize("setting", [None, "", "1"])
@pytest.mark.parametrize(("count", "available"), [(1, True), (64, True), (65, False)])
def test_virtual_ipus_stand_in_for_hardware(environment, setting, count, available):
    if setting is not None:
        environment("IPU_DYNAMO_HARDWARE", setting)
    assert poptorch.ipuHardwareIsAvailable(count) == available
    assert poptorch.ipuHardwareIsAvailable(num_ipus=count) == available
    assert poptorch.poptorch_core.ipuHardwareVersion(count) == (2 if available else 0)


def test_the_environment_can_deny_it(environment):
    environment("IPU_DYNAMO_HARDWARE", "0")
    assert not poptorch.ipuHardwareIsAvailable()
    with pytest.raises(AssertionError, match="No IPU hardware available on this system"):
        poptorch.ipuHardwareVersion()
    assert poptorch.poptorch_core.ipuHardwareVersion() == 0


@pytest.mark.parametrize(("setting", "lines"), [(None, 1), ("0", 0), ("1", 0)])
def test_the_first_answer_says_that_ipus_are_virtual(environment, caplog, setting, lines):
    if setting is not None:
        environment("IPU_DYNAMO_HARDWARE", setting)
    hardware._say_that_ipus_are_virtual.cache_clear()
    poptorch.logger.addHandler(caplog.handler)
    level = poptorch.logger.level
    poptorch.logger.setLevel("INFO")
    try:
        poptorch.ipuHardwareIsAvailable()
        poptorch.ipuHardwareIsAvailable()
    finally:
        poptorch.logger.setLevel(level)
        poptorch.logger.removeHandler(caplog.handler)
    assert len([r for r in caplog.records if "virtual" in r.getMessage()]) == lines


@pytest.mark.parametrize("variable", ["POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"])
@pytest.mark.parametrize(("value", "available"), [("1", False), ("0", True), ("", True)])
def test_the_model_is_no_hardware(environment, variable, value, available):
    environment("IPU_DYNAMO_HARDWARE", "1")
    environment(variable, value)
    assert poptorch.ipuHardwareIsAvailable() == available


@pytest.mark.parametrize(
    ("name", "version"), [("", 2), ("ipu1", 1), ("ipu2", 2), ("ipu21", 21), ("ipu:x", -1)]
)
def test_the_generation_is_configured(environment, name, version):
    environment("IPU_DYNAMO_HARDWARE", "1")
    environment("POPTORCH_IPU_MODEL_VERSION", name)
    assert poptorch.ipuHardwareVersion() == version


def test_a_wrong_setting_is_named(environment):
    environment("POPTORCH_IPU_MODEL_VERSION", "ipu9")
    with pytest.raises(poptorch.Error, match="Invalid IPU model version 'ipu9'"):
        poptorch.ipuHardwareVersion()
    environment("IPU_DYNAMO_HARDWARE", "yes")
    with pytest.raises(poptorch.Error, match="IPU_DYNAMO_HARDWARE must be 0 or 1, got 'yes'"):
        poptorch.ipuHardwareIsAvailable()
    environment("IPU_DYNAMO_HARDWARE", "")
    environment("POPTORCH_IPU_MODEL", "yes")
    with pytest.raises(poptorch.Error, match="POPTORCH_IPU_MODEL must be an integer, got 'yes'"):
        poptorch.ipuHardwareIsAvailable()
