"""Turn the state of a model that files keep into one JSON value, and back."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ipu_dynamo.keras.attach.model_state import state_of
from ipu_dynamo.keras.private.keras_graphs import (
    seed_variables,
)
from ipu_dynamo.keras.private.keras_private import (
    Functional,
    Sequential,
)
from ipu_dynamo.keras.settings import change_settings
from ipu_dynamo.keras.settings.notices import notice
from ipu_dynamo.keras.stages.assignments import (
    Element,
    NestedAssignment,
    layer_element,
    nested_element,
)
from ipu_dynamo.keras.stages.layer_graph import LayerGraph, layer_graph
from ipu_dynamo.keras.stages.model_assignment import set_assignment

KEY = "ipu"  # in a model's configuration, or in its build configuration
VERSION = 1

_COUNT = re.compile(r"_\d+$")  # at the end of the names that Keras makes up

logger = logging.getLogger("ipu_dynamo.keras")


def stored_state(model: Any) -> dict[str, Any]:
    """The options, stages and seed states of a model, as JSON has them."""
    state = state_of(model)
    settings = state.settings
    for setter, keywords in (
        ("set_gradient_accumulation_options", settings.accumulation_keywords),
        ("set_pipelining_options", settings.pipelining_keywords),
    ):
        if keywords:
            logger.info(
                "a file of model %s does not hold %s: call %s again after loading it",
                model.name,
                ", ".join(keywords),
                setter,
            )
    mapping = settings.device_mapping
    return {
        "version": VERSION,
        "gradient_accumulation_steps_per_replica": settings.accumulation_steps,
        "gradient_accumulation_reduction_method": settings.reduction.name.lower(),
        "pipelining_gradient_accumulation_steps_per_replica": (
            settings.pipelining_accumulation_steps
        ),
        "pipelining_device_mapping": None if mapping is None else list(mapping),
        "pipelining_accumulate_outfeed": settings.accumulate_outfeed,
        "replicated_metric_reduction_method": settings.metric_reduction.name.lower(),
        "asynchronous_callbacks": settings.asynchronous_callbacks,
        "infeed_kwargs": _storable(settings.infeed_keywords),
        "outfeed_kwargs": _storable(settings.outfeed_keywords),
        "seed_states": [variable.numpy().tolist() for variable in seed_variables(model)],
        "pipeline_stage_assignment": _stored_elements(model, state.assignment or []),
        "pipeline_stage_assignment_valid": state.invalid is None,
    }


def restore_state(model: Any, stored: Mapping[str, Any]) -> None:
    """Set the options, stages and seed states of a new model.

    Raises:
        ValueError: the file is of a newer version, or its assignment does not fit the model.
    """
    version = stored.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise ValueError(
            f"the options of model {model.name} were stored in version {version!r} of their form, "
            f"and this package reads up to version {VERSION}: use the package that wrote the file, "
            "or a newer one"
        )
    state_of(model).change(**_settings(stored))
    _restore_seeds(model, stored["seed_states"])
    if stored["pipeline_stage_assignment"]:
        _restore_assignment(model, stored)


def _settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "reduction": change_settings.reduction_method(
            stored["gradient_accumulation_reduction_method"]
        ),
        "asynchronous_callbacks": bool(stored["asynchronous_callbacks"]),
        **change_settings.replication(stored["replicated_metric_reduction_method"]),
        **change_settings.infeed(stored["infeed_kwargs"]),
        **change_settings.outfeed(stored["outfeed_kwargs"]),
    }
    for field, key, read in (
        (
            "accumulation_steps",
            "gradient_accumulation_steps_per_replica",
            change_settings.accumulation_steps,
        ),
        (
            "pipelining_accumulation_steps",
            "pipelining_gradient_accumulation_steps_per_replica",
            change_settings.accumulation_steps,
        ),
        ("device_mapping", "pipelining_device_mapping", change_settings.ipus_of_stages),
        ("accumulate_outfeed", "pipelining_accumulate_outfeed", bool),
    ):
        if stored[key] is not None:
            changes[field] = read(stored[key])
    return changes


def _restore_seeds(model: Any, states: Sequence[Sequence[int]]) -> None:
    variables = seed_variables(model)
    if len(states) != len(variables):
        notice(
            state_of(model).notices,
            "seed_states",
            f"model {model.name} has {len(variables)} seed generators, and its file holds the "
            f"states of {len(states)}: the model keeps its own",
        )
        return
    for variable, state in zip(variables, states, strict=True):
        variable.assign(state)


def _restore_assignment(model: Any, stored: Mapping[str, Any]) -> None:
    rows = stored["pipeline_stage_assignment"]
    try:
        if not stored["pipeline_stage_assignment_valid"]:
            raise ValueError(f"the model had changed after layer {rows[-1][0]} was assigned")
        set_assignment(model, _elements(model, rows))
    except ValueError as error:
        raise ValueError(
            f"the pipeline stage assignment in the file of model {model.name} is no longer valid: "
            f"{error}"
        ) from error


def _stored_elements(model: Any, assignment: Sequence[Element]) -> list[Any]:
    graph = layer_graph(model) if assignment else None
    rows: list[Any] = []
    for element in assignment:
        assert graph is not None
        last: Any
        if isinstance(element, NestedAssignment):
            last = _stored_elements(element.layer, element.pipeline_stage_assignments)
        else:
            last = element.pipeline_stage
        rows.append([element.layer.name, _rank(graph, element.layer, element.node_index), last])
    return rows


def _elements(model: Any, rows: Sequence[Any]) -> list[Element]:
    """Elements for the model's calls, from rows that have to name them in order."""
    graph = layer_graph(model)
    calls = graph.layer_calls
    if len(rows) != len(calls):
        known = {call.operation.name for call in calls}
        foreign = [name for name, _, _ in rows if name not in known]
        raise ValueError(
            f"it has {len(rows)} layers, layer {(foreign or [rows[-1][0]])[0]} among them, and the "
            f"model {len(calls)}"
        )
    elements: list[Element] = []
    for call, (name, rank, last) in zip(calls, rows, strict=True):
        here, here_rank = call.operation.name, _rank(graph, call.operation, call.index)
        if not _same_name(model, here, name) or here_rank != rank:
            raise ValueError(
                f"it has layer {name} (call {rank}) where the model has {here} (call {here_rank})"
            )
        if isinstance(last, list) != call.is_model:
            raise ValueError(f"layer {name} is a model in only one of file and model")
        if call.is_model:
            inner = _elements(call.operation, last)
            elements.append(nested_element(model, call.operation, call.index, inner))
        else:
            elements.append(layer_element(model, call.operation, call.index, last))
    return elements


def _same_name(model: Any, name: str, stored: str) -> bool:
    """Whether a layer is the stored one.

    The layers of a Model subclass are made anew by its Python, and Keras counts on in their names.
    """
    if isinstance(model, Functional | Sequential):
        return name == stored
    return _COUNT.sub("", name) == _COUNT.sub("", stored)


def _rank(graph: LayerGraph, layer: Any, index: int) -> int:
    """Which of the layer's calls in this graph has an index.

    In a Functional the index counts calls in other graphs too, which a file does not hold.
    """
    if not isinstance(graph.model, Functional):
        return index
    ranks: defaultdict[int, list[int]] = defaultdict(list)
    for call in graph.layer_calls:
        ranks[id(call.operation)].append(call.index)
    indices = sorted(ranks[id(layer)])
    return indices.index(index) if index in indices else index


def _storable(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that JSON can hold; of others, which have no effect, the text."""

    def text(value: Any) -> str:
        return str(value)

    return {name: json.loads(json.dumps(value, default=text)) for name, value in keywords.items()}
