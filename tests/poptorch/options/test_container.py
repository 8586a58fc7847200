"""Check reading, writing, freezing and copying of options."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from poptorch.options.container import OptionsDict


@pytest.fixture
def options():
    return OptionsDict(count=3, name="x")


def test_values_are_attributes_and_calls(options):
    assert options.count == options("count") == 3
    with pytest.raises(AttributeError, match=r"Invalid attribute cuont\..*count"):
        _ = options.cuont


def test_a_setter_of_another_part_is_named():
    with pytest.raises(AttributeError, match=r"did you mean Training\.gradientAccumulation\?"):
        poptorch.Options().gradientAccumulation(4)


def test_an_attribute_write_is_a_set(options):
    options.count = 4
    options.set(name="y")
    assert options.toDict() == {"count": 4, "name": "y"}
    options.count = True
    assert options.count is True


@pytest.mark.parametrize("write", [lambda o: setattr(o, "cuont", 1), lambda o: o.set(cuont=1)])
def test_an_unknown_option_is_refused_with_near_names(options, write):
    with pytest.raises(AssertionError, match=r"Invalid option cuont \(did you mean count\?\)"):
        write(options)


def test_an_unknown_private_attribute_is_refused(options):
    with pytest.raises(AttributeError, match="Invalid private attribute _cuont"):
        options._cuont = 1


@pytest.mark.parametrize("value", ["4", 4.0, None, [4]])
def test_a_value_of_another_type_is_refused(options, value):
    with pytest.raises(AssertionError, match=r"Unexpected type .* for option count"):
        options.count = value
    assert options.count == 3


def test_options_come_and_go(options):
    options.createOrSet(new=1.5)
    options.createOrSet(new=2.5)
    assert options.exists("new")
    with pytest.raises(AssertionError, match="Unexpected type"):
        options.createOrSet(new="text")
    options.deleteIfExists("new")
    options.deleteIfExists("new")
    assert not options.exists("new")


def test_update_merges_and_refuses_doubles(options):
    assert options.update({"other": 1}) == {"other": 1, "count": 3, "name": "x"}
    with pytest.raises(AssertionError, match="in two places: count"):
        options.update({"count": 1})
    assert not options.exists("other")


CHANGES = [
    lambda o: o.deviceIterations(2),
    lambda o: setattr(o, "device_iterations", 2),
    lambda o: o.set(device_iterations=2),
    lambda o: o.createOrSet(model_name="m"),
    lambda o: o.deleteIfExists("log_dir"),
    lambda o: o.randomSeed(42),
    lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()),
    lambda o: o.showCompilationProgressBar(False),
    lambda o: o.from_json('{"deviceIterations": 2}'),
    lambda o: o.Training.gradientAccumulation(2),
    lambda o: o.Training.setAutomaticLossScaling(True),
    lambda o: o.Precision.setPartialsType(torch.half),
    lambda o: o.Distributed.configureProcessId(1, 2),
    lambda o: o.TensorLocations.numIOTiles(32),
    lambda o: o._Popart.set("enableOutlining", True),
    lambda o: o._Popart.setPatterns({}),
    lambda o: o.checkIsFrozen(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_frozen_options_refuse_every_change(change):
    options = poptorch.Options()
    options._freeze()
    text = repr(options)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        change(options)
    assert repr(options) == text
    options._unfreeze()
    change(options)


def test_a_refused_seed_does_not_touch_the_hosts_generator():
    options = poptorch.Options()
    options._freeze()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with pytest.raises(AttributeError):
        options.randomSeed(42)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda o: o.clone()])
@pytest.mark.parametrize("change", CHANGES[:-1])
def test_a_copy_is_independent_and_unfrozen(twin, change):
    options = poptorch.Options().deviceIterations(5)
    options.anchorTensor("a", "tensor")
    options.Distributed.configureProcessId(5, 15)
    options._Popart.set("engineOptions", {"a": "b"})
    options._freeze()
    text, strategy = repr(options), repr(options._execution_strategy)
    again = twin(options)
    assert type(again) is poptorch.Options
    assert repr(again) == text
    change(again)
    again.anchorTensor("b", "tensor")
    again._Popart.options["engineOptions"]["a"] = "c"
    assert repr(options) == text
    assert repr(options._execution_strategy) == strategy


def test_the_parts_of_a_copy_write_to_the_copy():
    options = poptorch.Options()
    again = options.clone()
    again.Precision.enableStochasticRounding(True)
    again.Training.setAutomaticLossScaling(True)
    assert again._Popart.options["enableStochasticRounding"] is True
    assert again._Popart.options["automaticLossScalingSettings.enabled"] is True
    assert options._Popart.options.keys() == poptorch.Options()._Popart.options.keys()


def test_options_can_be_pickled():
    options = poptorch.Options().deviceIterations(3)
    options._freeze()
    again = pickle.loads(pickle.dumps(options))
    assert repr(again) == repr(options)
    with pytest.raises(AttributeError, match="frozen"):
        again.deviceIterations(2)


def test_a_subclass_can_take_over_a_part():
    class Distributed(poptorch.options._DistributedOptions):
        pass

    options = poptorch.Options()
    options.Distributed.configureProcessId(1, 3)
    options.Distributed.__class__ = Distributed
    assert type(options.Distributed) is Distributed
    assert options.Distributed.numProcesses == 3


@given(iterations=st.integers(), replicas=st.integers())
def test_repr_shows_values_and_no_addresses(iterations, replicas):
    def build():
        return poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)

    options = build().modelName("net")
    text = repr(options)
    assert text.startswith("Options(")
    for part in (f"device_iterations={iterations}", f"replication_factor={replicas}"):
        assert part in text
    assert "Training=_TrainingOptions(" in text
    assert text == repr(build().modelName("net"))
    assert f"{id(options):x}" not in text


def test_equality_is_identity():
    assert poptorch.Options() != poptorch.Options()
