"""Check the answers about hardware, of which there is none."""

import pytest

import poptorch

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


@pytest.mark.usefixtures("environment")
def test_there_is_no_hardware():
    assert not poptorch.ipuHardwareIsAvailable()
    with pytest.raises(AssertionError, match="No IPU hardware available on this system"):
        poptorch.ipuHardwareVersion()
    assert poptorch.poptorch_core.ipuHardwareVersion() == 0


@pytest.mark.parametrize(("count", "available"), [(1, True), (64, True), (65, False)])
def test_the_environment_can_pretend(environment, count, available):
    environment("IPU_DYNAMO_HARDWARE", "1")
    assert poptorch.ipuHardwareIsAvailable(count) == available
    assert poptorch.ipuHardwareIsAvailable(num_ipus=count) == available
    assert poptorch.poptorch_core.ipuHardwareVersion(count) == (2 if available else 0)


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
    environment("IPU_DYNAMO_HARDWARE", "1")
    environment("POPTORCH_IPU_MODEL_VERSION", "ipu9")
    with pytest.raises(poptorch.Error, match="Invalid IPU model version 'ipu9'"):
        poptorch.ipuHardwareVersion()
    environment("POPTORCH_IPU_MODEL", "yes")
    with pytest.raises(poptorch.Error, match="POPTORCH_IPU_MODEL must be an integer, got 'yes'"):
        poptorch.ipuHardwareIsAvailable()
