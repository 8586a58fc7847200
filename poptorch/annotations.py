"""Annotate the operators of a part of a model: name them, or give them attributes."""

from contextlib import AbstractContextManager
from typing import Any, Self

from ipu_dynamo.capture.scopes import name_scope
from poptorch.errors import require


class Attribute:
    """A context that gives the operators inside attributes of strings; recorded only.

    PopTorch programs mark layers with `__outline`, a hint about code that may be shared. Here the
    compiler finds equal blocks by itself, so that the context changes nothing.

    Args:
        attributes: each a dictionary of strings by name, such as `__outline={"layer": "encoder"}`.
    """

    def __init__(self, **attributes: dict[str, str]) -> None:
        for name, values in attributes.items():
            texts = isinstance(values, dict) and all(
                isinstance(text, str) for item in values.items() for text in item
            )
            require(texts, f"Attribute {name} must be a dictionary of strings, got {values!r}")
        self._attributes = attributes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class NameScope:
    """A context that puts a prefix before the names of the operators inside, in a trace.

    Args:
        name: the prefix, which is followed by `/`. Contexts can be nested.
    """

    def __init__(self, name: str) -> None:
        require(isinstance(name, str), f"Parameter to NameScope must be a string, got {name!r}")
        self._name = name
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        self._entered.append(name_scope(self._name))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


__all__ = ["Attribute", "NameScope"]
