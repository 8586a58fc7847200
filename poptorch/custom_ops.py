"""Let models call operators that users define."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo import custom_operator
from poptorch.errors import createPoptorchError
from poptorch.tracing import isRunningOnIpu

_PREFIX = "attr:"
_KINDS = (float, int, str)
_LARGEST = torch.finfo(torch.float32).max
_known: dict[str, dict[str, Any]] = {}  # the attributes of all calls, by id


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[Tensor],
    attributes: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """The results of an operator that `ipu_dynamo.register_custom_operator` has a function for.

    Outside a model that is compiled they are zeros like `example_outputs`.

    Args:
        inputs: of the operator.
        name: of the operator, as it was registered.
        domain: of the operator, as it was registered.
        domain_version: of the operator, as it was registered.
        example_outputs: tensors with the shapes and types of the results.
        attributes: floats, integers, strings, or lists of one of them, by name.

    Raises:
        ValueError: attributes of other types.
        poptorch.Error: nothing is registered, a result is not like its example, or a number is too
            large.
    """
    given = dict(attributes or {})
    _check(given)
    _known[f"{_PREFIX}{len(_known):x}"] = given
    if not isRunningOnIpu():
        return [torch.zeros_like(example) for example in example_outputs]
    return custom_operator(
        inputs, name, domain, domain_version, example_outputs=example_outputs, attributes=given
    )


def accessAttributes(attribute_id_str: str) -> dict[str, Any]:
    """The attributes of a call of `custom_op`, from the id that PopTorch gives them.

    Args:
        attribute_id_str: `attr:` with a hexadecimal number, which counts the calls from 0; or the
            attributes themselves, as the text of a JSON object.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(attribute_id_str, str):
        raise ValueError(f"Wrong type for attribute_id_str: {type(attribute_id_str)}; give a str")
    if attribute_id_str.startswith("{"):
        found: dict[str, Any] = json.loads(attribute_id_str)
        return found
    if not attribute_id_str.startswith(_PREFIX):
        raise ValueError(f"Invalid attribute id {attribute_id_str}: it begins with {_PREFIX}")
    if attribute_id_str not in _known:
        raise ValueError(f"No call of custom_op has attributes {attribute_id_str}")
    return dict(_known[attribute_id_str])


def _check(attributes: Mapping[Any, Any]) -> None:
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError("All attribute keys must be strings.")
        _check_text(key)
        values = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(one, _KINDS) for one in values):
            raise ValueError(
                "Attribute values must be floats, ints, strings, or lists or tuples of them."
            )
        if len({_kind(one) for one in values}) > 1:
            raise ValueError("The types in a list/tuple attribute must all be the same.")
        for one in values:
            _check_value(one)


def _kind(value: Any) -> type:
    return next(kind for kind in _KINDS if isinstance(value, kind))


def _check_value(value: Any) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float) and abs(value) > _LARGEST:
        raise createPoptorchError(
            f"{value} is too {'high' if value > 0 else 'low'} for a Popart float attribute.",
            id="operator",
        )


def _check_text(text: str) -> None:
    if not text.isascii():
        raise ValueError(f"{text} contains non-ASCII characters.")


__all__ = ["accessAttributes", "custom_op"]
