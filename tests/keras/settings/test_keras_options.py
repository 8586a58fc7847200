"""Check every setter: what it keeps, what it replaces, and what it refuses by name."""

import inspect
import logging

import keras
import pytest
import torch

from ipu_dynamo.keras import (
    GradientAccumulationReductionMethod,
    PipelineSchedule,
    RecomputationMode,
    ReplicatedMetricReductionMethod,
    extend,
)
from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.settings.keyword_tables import TABLES


@pytest.fixture
def model():
    return extend(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))


def settings(model):
    return state_of(model).settings


def test_what_is_none_keeps_its_value(model):
    model.set_pipelining_options(4, [0, 1], True)
    model.set_pipelining_options()
    assert settings(model).pipelining_accumulation_steps == 4
    assert settings(model).device_mapping == (0, 1)
    assert settings(model).accumulate_outfeed is True
    model.set_gradient_accumulation_options(8)
    model.set_gradient_accumulation_options()
    assert settings(model).accumulation_steps == 8
    assert settings(model).pipelining_accumulation_steps == 4


def test_the_last_call_of_either_setter_sets_the_reduction(model):
    methods = GradientAccumulationReductionMethod
    model.set_gradient_accumulation_options(gradient_accumulation_reduction_method="Mean")
    assert settings(model).reduction is methods.MEAN
    model.set_pipelining_options(gradient_accumulation_reduction_method=methods.RUNNING_MEAN)
    assert settings(model).reduction is methods.RUNNING_MEAN
    model.set_gradient_accumulation_options(2)
    assert settings(model).reduction is methods.SUM
    model.set_gradient_accumulation_options(reduction_method="running_mean")
    assert settings(model).reduction is methods.RUNNING_MEAN


def test_the_reduction_has_two_names_and_takes_one(model):
    for said in ("mean", "sum"):
        with pytest.raises(ValueError, match=rf"'{said}' and reduction_method is 'sum'"):
            model.set_gradient_accumulation_options(
                gradient_accumulation_reduction_method=said, reduction_method="sum"
            )
    signature = inspect.signature(model.set_gradient_accumulation_options)
    assert signature.parameters["gradient_accumulation_reduction_method"].default == "sum"


def test_keywords_replace_those_of_an_earlier_call(model):
    model.set_pipelining_options(offload_weights=True, name="a")
    model.set_pipelining_options(pipeline_schedule="interleaved")
    assert settings(model).pipelining_keywords == {
        "pipeline_schedule": PipelineSchedule.Interleaved
    }
    model.set_gradient_accumulation_options(dtype="float16")
    model.set_gradient_accumulation_options(name="b")
    assert settings(model).accumulation_keywords == {"name": "b"}
    model.set_infeed_queue_options(prefetch_depth=2)
    model.set_infeed_queue_options(optimise_latency=True)
    assert settings(model).infeed_keywords == {"optimise_latency": True}
    model.set_outfeed_queue_options(buffer_depth=3)
    model.set_outfeed_queue_options()
    assert settings(model).outfeed_keywords == {}


@pytest.mark.parametrize(
    ("setter", "arguments"),
    [
        ("set_gradient_accumulation_options", {}),
        ("set_pipelining_options", {}),
        ("set_replication_options", {}),
        ("set_infeed_queue_options", {}),
        ("set_outfeed_queue_options", {}),
        ("set_asynchronous_callbacks", {}),
        ("set_pipeline_stage_assignment", {"pipeline_stage_assignment": [0]}),
        ("reset_pipeline_stage_assignment", {}),
    ],
)
def test_every_setter_drops_what_was_compiled(model, setter, arguments):
    state_of(model).programs["fit"] = object()
    getattr(model, setter)(**arguments)
    assert state_of(model).programs == {}


@pytest.mark.parametrize("setter", ["set_gradient_accumulation_options", "set_pipelining_options"])
@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "2"])
def test_steps_are_positive_integers(model, setter, steps):
    with pytest.raises(ValueError, match=r"_steps_per_replica is .*to be a positive integer"):
        getattr(model, setter)(gradient_accumulation_steps_per_replica=steps)
    assert settings(model).accumulation_steps is None


@pytest.mark.parametrize("setter", ["set_gradient_accumulation_options", "set_pipelining_options"])
def test_an_unknown_reduction_lists_the_members(model, setter):
    with pytest.raises(ValueError, match=r"'product'.*SUM, MEAN, RUNNING_MEAN"):
        getattr(model, setter)(gradient_accumulation_reduction_method="product")


def test_the_reduction_of_metrics(model):
    for name in ("none", "List", "SUM", "mean"):
        model.set_replication_options(name)
        assert settings(model).metric_reduction.name == name.upper()
    model.set_replication_options(ReplicatedMetricReductionMethod.LIST)
    assert settings(model).metric_reduction is ReplicatedMetricReductionMethod.LIST
    with pytest.raises(ValueError, match=r"NONE, LIST, SUM, MEAN"):
        model.set_replication_options("max")


@pytest.mark.parametrize("mapping", [(0, 1), [0, 1.0], [True], "01", 3])
def test_a_device_mapping_is_a_list_of_integers(model, mapping):
    with pytest.raises(ValueError, match="a list of integers"):
        model.set_pipelining_options(device_mapping=mapping)


def test_no_ipu_has_a_negative_number(model):
    with pytest.raises(ValueError, match="negative"):
        model.set_pipelining_options(device_mapping=[0, -1])


@pytest.mark.parametrize(
    ("setter", "option"),
    [
        ("set_pipelining_options", "accumulate_outfeed"),
        ("set_asynchronous_callbacks", "asynchronous"),
    ],
)
def test_what_is_on_or_off_is_a_bool(model, setter, option):
    with pytest.raises(ValueError, match=f"{option} is 1, and takes True or False"):
        getattr(model, setter)(**{option: 1})


REFUSED = [(table.setter, name) for table in TABLES for name in table.refused]
KNOWN = [(table, name) for table in TABLES for name in table.known]


def test_the_tables_have_what_the_published_setters_name():
    assert len(REFUSED) == 3 + 12 + 4 + 2
    assert len(KNOWN) == 4 + 17 + 2 + 2


@pytest.mark.parametrize(("setter", "name"), REFUSED)
def test_a_refused_keyword_is_named_with_what_to_use(model, setter, name):
    with pytest.raises(ValueError, match=rf"{setter} does not take {name}: \w+"):
        getattr(model, setter)(**{name: None})


@pytest.mark.parametrize(
    ("setter", "name", "words"),
    [
        (
            "set_gradient_accumulation_options",
            "num_mini_batches",
            "gradient_accumulation_steps_per_replica",
        ),
        (
            "set_gradient_accumulation_options",
            "experimental_normalize_gradients",
            "gradient_accumulation_reduction_method",
        ),
        (
            "set_pipelining_options",
            "gradient_accumulation_count",
            "gradient_accumulation_steps_per_replica",
        ),
        ("set_pipelining_options", "inputs", "automatically set by Keras"),
        ("set_pipelining_options", "outfeed_mask", "not compatible with Keras"),
        (
            "set_pipelining_options",
            "reduction_method",
            "use gradient_accumulation_reduction_method",
        ),
    ],
)
def test_a_refusal_says_why(model, setter, name, words):
    with pytest.raises(ValueError, match=words):
        getattr(model, setter)(**{name: None})


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.setter)
def test_an_unknown_keyword_names_near_parameters(model, table):
    setter = getattr(model, table.setter)
    parameters = inspect.signature(setter).parameters.values()
    assert table.named == tuple(p.name for p in parameters if p.kind != p.VAR_KEYWORD)
    for name in table.named:
        with pytest.raises(TypeError, match=rf"does not know {name}s; try {name}\b"):
            setter(**{f"{name}s": None})


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.setter)
def test_an_unknown_keyword_names_near_ones(model, table):
    name = next(iter(table.known))
    with pytest.raises(TypeError, match=f"does not know {name}s; try {name}"):
        getattr(model, table.setter)(**{f"{name}s": None})


@pytest.mark.parametrize(
    ("table", "name"), [case for case in KNOWN if case[1] != "continuous_weight_updates"]
)
def test_a_known_keyword_takes_none_or_says_what_it_takes(model, table, name):
    if name.endswith("_depth"):
        for depth in (0, None, 1.5, True):
            with pytest.raises(ValueError, match=f"{name} is .*positive integer"):
                getattr(model, table.setter)(**{name: depth})
        return
    getattr(model, table.setter)(**{name: None})
    if table.known[name].values == "any":
        getattr(model, table.setter)(**{name: object()})
        return
    with pytest.raises(ValueError, match=f"{name} is"):
        getattr(model, table.setter)(**{name: 3})


@pytest.mark.parametrize("name", ["sequential", "SEQUENTIAL", PipelineSchedule.Sequential])
def test_a_schedule_by_member_or_name(model, name):
    model.set_pipelining_options(pipeline_schedule=name)
    keywords = settings(model).pipelining_keywords
    assert keywords["pipeline_schedule"] is PipelineSchedule.Sequential
    model.set_pipelining_options(recomputation_mode="recomputethenbackpropagate")
    keywords = settings(model).pipelining_keywords
    assert keywords["recomputation_mode"] is RecomputationMode.RecomputeThenBackpropagate


def test_a_dtype_by_torch_name_or_function(model):
    for value, kept in (
        (torch.float16, torch.float16),
        ("float16", torch.float16),
        ("torch.bfloat16", torch.bfloat16),
        (None, None),
    ):
        model.set_pipelining_options(gradient_accumulation_dtype=value)
        assert settings(model).pipelining_keywords["gradient_accumulation_dtype"] is kept
    function = torch.nn.Identity().forward
    model.set_gradient_accumulation_options(dtype=function)
    assert settings(model).accumulation_keywords["dtype"] == function
    for value in ("int32", torch.int64, "half precision", float):
        with pytest.raises(ValueError, match="dtype is"):
            model.set_gradient_accumulation_options(dtype=value)


def test_continuous_updates_are_not_offered(model):
    model.set_pipelining_options(continuous_weight_updates=False)
    with pytest.raises(NotImplementedError, match="continuous_weight_updates"):
        model.set_pipelining_options(continuous_weight_updates=True)
    with pytest.raises(ValueError, match="continuous_weight_updates is None"):
        model.set_pipelining_options(continuous_weight_updates=None)


def test_a_notice_comes_once_for_each_model_and_option(model, caplog):
    other = extend(keras.Sequential([keras.layers.Dense(2)]))
    with caplog.at_level(logging.WARNING, logger="ipu_dynamo.keras"):
        for _ in range(2):
            model.set_gradient_accumulation_options(use_v2_gradient_accumulation_optimizer=True)
            model.set_pipelining_options(replicated_weight_sharding=True)
            model.set_pipelining_options(replicated_optimizer_state_sharding=False)
        other.set_pipelining_options(replicated_weight_sharding=True)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split("=")[0] for message in messages] == [
        "use_v2_gradient_accumulation_optimizer",
        "replicated_weight_sharding",
        "replicated_weight_sharding",
    ]


def test_a_refused_call_changes_nothing(model):
    model.set_pipelining_options(4, offload_weights=True)
    before = settings(model)
    with pytest.raises(ValueError, match="device_mapping"):
        model.set_pipelining_options(8, device_mapping=[-1], name="c")
    assert settings(model) is before
