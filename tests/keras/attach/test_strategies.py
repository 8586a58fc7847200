"""Check where a strategy takes its number of IPUs from."""

import pytest

from ipu_dynamo.keras import IPUStrategy, IPUStrategyV1, ipu


@pytest.fixture(autouse=True)
def _nothing_in_force():
    yield
    ipu.config.reset_ipu_configuration()


def configuration(selected):
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = selected
    return config


def test_the_first_place_that_gives_a_number_counts():
    assert IPUStrategy().num_ipus == 1
    configuration([8, 16]).configure_ipu_system()
    assert IPUStrategy().num_ipus == 8
    assert IPUStrategy(device_id=1).num_ipus == 16
    assert IPUStrategy(config=configuration(2)).num_ipus == 2
    assert IPUStrategy(4, config=configuration(2)).num_ipus == 4
    assert IPUStrategy(config=ipu.config.IPUConfig()).num_ipus == 1


def test_arguments_of_old_programs():
    configuration([8, 16]).configure_ipu_system()
    assert IPUStrategyV1 is IPUStrategy
    assert IPUStrategy("/device:IPU:1").num_ipus == 16
    assert IPUStrategy(ipu_device="/device:IPU:1", cpu_device="/cpu:0").num_ipus == 16
    assert IPUStrategy("/device:IPU:0", "/cpu:0", enable_dataset_iterators=False).num_ipus == 8


@pytest.mark.parametrize("number", [0, -2, 1.0, True, [2]])
def test_what_is_no_positive_integer_is_refused(number):
    with pytest.raises(ValueError, match=r"num_ipus is .*positive integer"):
        IPUStrategy(number)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"device_id is 2, and auto_select_ipus .* has 2 entries"):
        IPUStrategy(config=configuration([1, 2]), device_id=2)
    with pytest.raises(ValueError, match="device_id is -1"):
        IPUStrategy(config=configuration([1, 2]), device_id=-1)
    with pytest.raises(ValueError, match="has to be like"):
        IPUStrategy("/device:GPU:0")
