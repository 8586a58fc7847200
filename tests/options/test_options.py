"""Check that options are checked once, where they enter."""

import dataclasses
import re

import pytest

from ipu_dynamo import IpuError, Options, StageSpec, Strategy
from ipu_dynamo.options import OptionError


def test_defaults_are_one_plain_micro_batch():
    options = Options()
    counts = (options.device_iterations, options.gradient_accumulation, options.replicas)
    assert counts == (1, 1, 1)
    assert options.engine == "auto"
    assert not options.narrow


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine", "fast"),
        ("engine", None),
        ("output_mode", "last"),
        ("reduction", "max"),
        ("mean_strategy", "before"),
        ("device_iterations", 0),
        ("gradient_accumulation", -1),
        ("replicas", 1.0),
        ("replicas", "2"),
        ("replicas", True),
        ("return_period", 0),
        ("loss_scale", 0.0),
        ("loss_scale", float("nan")),
        ("loss_scale", float("inf")),
        ("loss_scale", "1"),
        ("strategy", "pipelined"),
        ("narrow", "no"),
        ("memory_proportion", 1.5),
        ("memory_proportion", True),
        ("memory_proportion", {0: -0.1}),
        ("memory_proportion", {"IPU0": 0.1}),
        ("sync_pattern", "all"),
        ("seed", 1.5),
    ],
)
def test_value_that_an_option_cannot_have_is_refused_by_name(name, value):
    with pytest.raises(OptionError, match=rf"option {name} (is|takes) .*{re.escape(repr(value))}"):
        Options(**{name: value})


def test_choices_are_listed():
    with pytest.raises(OptionError, match="choose one of auto, inductor, eager"):
        Options(engine="fast")
    with pytest.raises(OptionError, match="strategy auto_stage is 'next'; choose one of same_as"):
        Strategy(auto_stage="next")


def test_input_groups_divide_the_replicas():
    assert Options(replicas=6, input_group_size=3).input_groups == 2
    with pytest.raises(OptionError, match="input_group_size is 4; it must divide the 6 replicas"):
        Options(replicas=6, input_group_size=4)


@pytest.mark.parametrize("period", [3, 8])
def test_return_period_is_a_factor_of_the_device_iterations(period):
    with pytest.raises(
        OptionError, match=f"return_period is {period}; it must be a factor of the 4"
    ):
        Options(device_iterations=4, output_mode="every", return_period=period)
    assert Options(device_iterations=4, output_mode="every", return_period=2).return_period == 2


@pytest.mark.parametrize("mode", ["default", "all", "final", "sum"])
def test_return_period_without_every_is_refused(mode):
    with pytest.raises(OptionError, match=f"return_period is 2, and output_mode is '{mode}'; a pe"):
        Options(device_iterations=4, output_mode=mode, return_period=2)


@pytest.mark.parametrize("blocks", ["encoder", ["encoder"], (1,)])
def test_stage_has_a_tuple_of_names_of_blocks(blocks):
    with pytest.raises(OptionError, match=r"a tuple of names of blocks, such as \('encoder',\)"):
        StageSpec(blocks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": ("a", "b")}, r"strategy stages has \('a', 'b'\); each of its stages is a St"),
        ({"stages": [StageSpec(("a",))]}, "strategy stages has .*in a tuple"),
        ({"kind": "serial_phased", "phases": (("a",),)}, r"strategy phases has \('a',\); each"),
    ],
)
def test_strategy_of_other_types_is_refused(settings, message):
    with pytest.raises(OptionError, match=message):
        Strategy(**settings)


def test_default_output_mode_is_all_for_inference_and_final_for_training():
    assert Options().returns(training=False) == "all"
    assert Options().returns(training=True) == "final"
    assert Options(output_mode="sum").returns(training=True) == "sum"


def test_options_are_read_from_a_dictionary():
    given = {"replicas": 2, "strategy": Strategy("pipelined")}
    assert Options.read(given) == Options(replicas=2, strategy=Strategy("pipelined"))
    assert Options.read(None) == Options()
    options = Options(replicas=3)
    assert Options.read(options) is options


def test_unknown_option_is_refused_with_near_names():
    with pytest.raises(OptionError, match="no option 'replica'; did you mean: replicas"):
        Options.read({"replica": 2})
    with pytest.raises(OptionError, match="no option 'zzz'; there are engine, device_iter"):
        Options.read({"zzz": 2})


def test_options_are_values():
    assert hash(Options(replicas=2)) == hash(Options(replicas=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().replicas = 2


def test_option_error_is_an_ipu_error_and_a_value_error():
    assert issubclass(OptionError, IpuError)
    assert issubclass(OptionError, ValueError)
