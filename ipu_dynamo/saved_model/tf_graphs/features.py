"""Find the dense features that a node parses from examples; they become program inputs.

Source: tensorflow/core/ops/parsing_ops.cc, ParseExample and ParseExampleV2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ipu_dynamo.saved_model.tf_graphs.attributes import attributes_of
from ipu_dynamo.saved_model.tf_graphs.constants import constant_tensor

PARSERS = frozenset(["ParseExample", "ParseExampleV2"])
_MOST_RESHAPES = 8  # that a default goes through
FEATURES = "ipu.features"  # key of a parser's attributes: its results by index


@dataclass(frozen=True, slots=True)
class Feature:
    """A dense feature of examples.

    Attributes:
        dtype: TensorFlow's number.
        shape: of one example.
        default: [*shape] of an example without it, if there is one.
    """

    name: str
    dtype: int
    shape: tuple[int | None, ...]
    default: Tensor | None


def sparse_results(message: Any) -> int:
    """How many results come before those of dense features."""
    attributes = attributes_of(message)
    return 3 * int(attributes.get("Nsparse", attributes.get("num_sparse", 0)))


def features_of(message: Any, constants: Mapping[str, Any]) -> dict[int, Feature]:
    """The dense features of a parser, by the index of its result.

    Args:
        constants: the nodes of the graph or function that it is in, by name.

    Raises:
        NotImplementedError: names or defaults of features are computed.
    """
    attributes = attributes_of(message)
    inputs = [text.partition(":")[0] for text in message.input if not text.startswith("^")]
    types, shapes = attributes.get("Tdense", []), attributes.get("dense_shapes", [])
    count, sparse = len(types), sparse_results(message)
    if message.op == "ParseExample":
        names = [_texts(constants, name)[0] for name in inputs[2 + sparse // 3 :][:count]]
    else:
        names = _texts(constants, inputs[3])
    defaults = inputs[len(inputs) - count :]
    return {
        sparse + i: Feature(names[i], types[i], shapes[i] or (), _default(constants, defaults[i]))
        for i in range(count)
    }


def _texts(constants: Mapping[str, Any], name: str) -> list[str]:
    message = constants.get(name)
    if message is None or message.op != "Const":
        raise NotImplementedError(f"node {name!r}, of the names of features, is no constant")
    texts = attributes_of(message)["value"].string_val
    return [text.decode("utf-8", "replace") for text in texts]


def _default(constants: Mapping[str, Any], name: str) -> Tensor | None:
    """The constant default of a feature; None if the graph has an empty one."""
    message = constants.get(name)
    for _ in range(_MOST_RESHAPES):
        if message is not None and message.op in ("Reshape", "Identity"):
            message = constants.get(message.input[0].partition(":")[0])
    if message is None or message.op != "Const":
        raise NotImplementedError(f"node {name!r}, of the default of a feature, is no constant")
    value = constant_tensor(attributes_of(message)["value"], f"node {name!r}")
    return value if value.numel() else None
