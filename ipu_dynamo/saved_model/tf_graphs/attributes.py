"""Read the attributes of a node as Python values."""

from typing import Any

from ipu_dynamo.saved_model.tf_graphs.meta_graphs import shape_of


def attributes_of(message: Any) -> dict[str, Any]:
    """The attributes of a node, by name; those of kinds that nothing reads are left out."""
    values = {}
    for entry in message.attr:
        attr = entry.value
        for kind in ("list", "s", "i", "f", "b", "type", "shape", "tensor", "func"):
            if attr.HasField(kind):
                values[entry.key] = _value(kind, getattr(attr, kind))
                break
    return values


def _value(kind: str, value: Any) -> Any:
    match kind:
        case "s":
            return value.decode("utf-8", "replace")
        case "shape":
            return shape_of(value)
        case "func":
            return value.name
        case "list":
            for name in ("i", "f", "b", "type"):
                if len(items := getattr(value, name)):
                    return list(items)
            if len(value.shape):
                return [shape_of(shape) for shape in value.shape]
            return [item.decode("utf-8", "replace") for item in value.s]
    return value
