"""Read JSON that users or files bring: no key twice, nothing deep, comments where allowed."""

import json
import re
from typing import Any

DEEPEST = 100
_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def parse_json(text: str, *, comments: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        comments: whether `//` and `/* */` outside of strings are left out.

    Raises:
        ValueError: it is no JSON, has a key twice in an object, or is nested too deep.
    """
    if comments:
        text = _COMMENT.sub(lambda part: part[0] if part[0][0] == '"' else " ", text)
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    if _depth_exceeds(value):
        raise ValueError(f"nested more than {DEEPEST} deep")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice in one object")
    return result


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _depth_exceeds(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            part
            for container in level
            if isinstance(container, dict | list)
            for part in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return False
    return True
