"""Check IPUConfig: its tree, what it refuses, and the configuration in force."""

import logging

import pytest

from ipu_dynamo.keras import IPUStrategy, ipu
from ipu_dynamo.keras.ipu.config import (
    IPUConfig,
    SelectionOrder,
    StochasticRoundingBehaviour,
    configure_ipu_system,
    get_ipu_config,
    reset_ipu_configuration,
)
from ipu_dynamo.keras.ipu.config_tree import Category


@pytest.fixture(autouse=True)
def _nothing_in_force():
    reset_ipu_configuration()
    yield
    reset_ipu_configuration()


def paths(category, prefix=""):
    """All options of a tree with their values."""
    for name in category._defaults:
        value = getattr(category, name)
        if isinstance(value, Category):
            yield from paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_the_tree_has_the_defaults():
    defaults = dict(paths(IPUConfig()))
    assert len(defaults) == 56
    assert defaults["auto_select_ipus"] == []
    assert defaults["selection_order"] is SelectionOrder.AUTO
    assert defaults["floating_point_behaviour.esr"] is StochasticRoundingBehaviour.OFF
    assert defaults["io_tiles.available_memory_proportion"] == 0.9
    assert defaults["norms.experimental.distributed_batch_norm_replica_group_size"] == 1
    assert defaults["optimizations.maximum_reduce_many_buffer_size"] == 0
    assert defaults["optimizations.math.dot_strength"] is True
    assert defaults["scheduling.maximum_scheduler_search_space_size"] == 64


def test_every_option_takes_its_default_and_no_other_object():
    config = IPUConfig()
    for path, value in list(paths(config)):
        *parents, name = path.split(".")
        category = config
        for parent in parents:
            category = getattr(category, parent)
        setattr(category, name, value)
        with pytest.raises(TypeError, match=path.replace(".", r"\.")):
            setattr(category, name, object())
        assert getattr(category, name) == value


def test_two_configurations_share_nothing():
    one, other = IPUConfig(), IPUConfig()
    one.matmuls.poplar_options["a"] = "b"
    one.auto_select_ipus.append(2)
    assert other.matmuls.poplar_options == {}
    assert other.auto_select_ipus == []


@pytest.mark.parametrize(
    ("value", "fits"), [(0.5, True), (1, True), (True, False), ("0.5", False), (None, False)]
)
def test_an_int_passes_for_a_float(value, fits):
    config = IPUConfig()
    if fits:
        config.io_tiles.available_memory_proportion = value
        assert config.io_tiles.available_memory_proportion == value
    else:
        with pytest.raises(TypeError, match=r"io_tiles\.available_memory_proportion is"):
            config.io_tiles.available_memory_proportion = value


def test_a_bool_is_no_int_and_esr_takes_both():
    config = IPUConfig()
    with pytest.raises(TypeError, match=r"io_tiles\.num_io_tiles is True"):
        config.io_tiles.num_io_tiles = True
    config.floating_point_behaviour.esr = True
    config.floating_point_behaviour.esr = StochasticRoundingBehaviour.ON
    with pytest.raises(TypeError, match="a member of StochasticRoundingBehaviour or type bool"):
        config.floating_point_behaviour.esr = SelectionOrder.AUTO


def test_an_unknown_attribute_names_near_ones():
    config = IPUConfig()
    with pytest.raises(AttributeError, match="no auto_select_ipu; near names: auto_select_ipus"):
        config.auto_select_ipu = 4
    with pytest.raises(
        AttributeError, match=r"no optimizations\.combine_matmul; .*combine_matmuls"
    ):
        _ = config.optimizations.combine_matmul


def test_a_category_cannot_be_assigned():
    with pytest.raises(TypeError, match="matmuls is a category"):
        IPUConfig().matmuls = {}


def test_a_copy_comes_into_force():
    config = IPUConfig()
    config.auto_select_ipus = 4
    config.configure_ipu_system()
    config.auto_select_ipus = 8
    (copy,) = get_ipu_config()
    assert copy.auto_select_ipus == 4
    copy.auto_select_ipus = 2
    assert get_ipu_config()[0].auto_select_ipus == 4
    assert IPUStrategy().num_ipus == 4


def test_a_strategy_keeps_its_number():
    config = IPUConfig()
    config.auto_select_ipus = [4, 2]
    ipu.utils.configure_ipu_system(config)
    strategy = ipu.ipu_strategy.IPUStrategy("/device:IPU:1")
    reset_ipu_configuration()
    reset_ipu_configuration()
    assert strategy.num_ipus == 2
    assert IPUStrategy().num_ipus == 1
    with pytest.raises(RuntimeError, match="no IPUConfig is in force"):
        get_ipu_config()


@pytest.mark.parametrize("number", [0, -1, [2, 0], (1, True)])
def test_a_number_below_one_is_refused(number):
    config = IPUConfig()
    config.auto_select_ipus = number
    with pytest.raises(ValueError, match="auto_select_ipus is"):
        configure_ipu_system(config)
    with pytest.raises(ValueError, match="auto_select_ipus is"):
        IPUStrategy(config=config)
    with pytest.raises(RuntimeError):
        get_ipu_config()


def test_two_ways_of_selecting_are_refused():
    config = IPUConfig()
    config.auto_select_ipus, config.select_ipus = 1, [3]
    with pytest.raises(ValueError, match="both auto_select_ipus and select_ipus"):
        config.configure_ipu_system()


def test_recorded_options_are_named_and_a_replacement_warned_of(caplog):
    config = IPUConfig()
    config.auto_select_ipus = 2
    config.optimizations.combine_matmuls = True
    config.device_connection.version = "ipu2"
    with caplog.at_level(logging.INFO, logger="ipu_dynamo.keras"):
        config.configure_ipu_system()
    assert [record.getMessage() for record in caplog.records] == [
        "recorded, without effect here: device_connection.version, optimizations.combine_matmuls"
    ]
    caplog.clear()
    IPUConfig().configure_ipu_system()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "is replaced" in record.getMessage()


def test_what_is_no_configuration_is_refused():
    with pytest.raises(TypeError, match="has to be an IPUConfig"):
        configure_ipu_system({"auto_select_ipus": 2})
    with pytest.raises(TypeError, match="has to be an IPUConfig"):
        IPUStrategy(config={"auto_select_ipus": 2})
