"""Check how arguments and results are nested: tuples, lists and mappings, and nothing that is
imported by a name."""

import json
from typing import Any

from ipu_dynamo.saved_model.files.json_values import parse_json
from ipu_dynamo.saved_model.gate.names import check_identifier
from ipu_dynamo.saved_model.gate.refusal import Refusal, damaged

_SEQUENCES = ("builtins.tuple", "builtins.list")
_VERSION = 1


def checked_spec(text: str, *, arguments: bool) -> str:
    """A tree as PyTorch writes it, written anew.

    Args:
        arguments: whether it is a pair of positional arguments and those by name.

    Raises:
        Refusal: it holds another container, or is not a tree.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise damaged(f"a tree of values is no JSON: {error}") from error
    if not isinstance(value, list) or len(value) != 2 or value[0] != _VERSION:
        raise Refusal(f"a tree of values of another form: {text[:80]!r}")
    tree = _checked(value[1])
    if arguments:
        kinds = [child["type"] for child in tree["children_spec"]]
        if tree["type"] != "builtins.tuple" or kinds != ["builtins.tuple", "builtins.dict"]:
            raise damaged("the arguments are no pair of positional ones and those by name")
        for name in json.loads(tree["children_spec"][1]["context"]):
            check_identifier(str(name))
    return json.dumps([_VERSION, tree])


def _checked(node: Any) -> dict[str, Any]:
    if not isinstance(node, dict) or node.keys() != {"type", "context", "children_spec"}:
        raise damaged("a tree of values has a node of another form")
    kind, context, children = node["type"], node["context"], node["children_spec"]
    if not isinstance(children, list):
        raise damaged("a tree of values has no list of children")
    if kind is None:
        if context is not None or children:
            raise damaged("a leaf of a tree of values has children")
        return {"type": None, "context": None, "children_spec": []}
    checked = [_checked(child) for child in children]
    if kind in _SEQUENCES:
        if context not in ("null", "[]"):
            raise Refusal(f"a {kind} with the context {str(context)[:80]!r}")
        return {"type": kind, "context": "null", "children_spec": checked}
    if kind != "builtins.dict":
        raise Refusal(f"a container {str(kind)[:80]!r}; tuples, lists and dicts are read")
    return {"type": kind, "context": _keys(context, len(checked)), "children_spec": checked}


def _keys(context: Any, count: int) -> str:
    """The keys of a mapping, which are texts or integers."""
    try:
        keys = parse_json(context) if isinstance(context, str) else None
    except ValueError as error:
        raise damaged(f"the keys of a mapping are no JSON: {error}") from error
    if not isinstance(keys, list) or any(type(key) not in (str, int) for key in keys):
        raise Refusal("a mapping with keys other than texts and integers")
    if len(keys) != count or len(set(keys)) != count:
        raise damaged("a mapping has not as many keys as values")
    return json.dumps(keys)
