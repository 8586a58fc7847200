"""Read values that `literals.py` wrote, from left to right; nothing in the text is run.

Names mean something only if they are in a table here: there is no look-up in a module.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import fx

from ipu_dynamo.program.ir.layout import Layout, device_named

T = TypeVar("T")

NAME = r"[A-Za-z_][A-Za-z0-9_]*"  # of records, fields, nodes and operators
_TOKEN = re.compile(
    rf"""[ ]*(?:(
    [()\[\]{{}},:=\#]
    |%{NAME}
    |"[^"\\]*(?:\\.[^"\\]*)*"
    |{NAME}\[[\d,]*\](?:\{{[\d,]*\}})?(?:@{NAME}(?::\d+)?)?
    |-(?:inf|\d[\w.+-]*)|\d[\w.+-]*
    |{NAME}(?:\.{NAME})*
    )|(?s:.+)|\Z)""",  # the group is empty for text that is no token
    re.ASCII | re.VERBOSE,
)
_KINDS = {  # of tokens, by their first character; all others begin a name or a tensor
    "": "end",
    **dict.fromkeys("()[]{},:=#", "sign"),
    "%": "node",
    '"': "string",
    **dict.fromkeys("-0123456789", "number"),
}
_DEEPEST = 32  # brackets in brackets: programs have a few, Python stops at 200
_CONSTANTS: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "inf": math.inf,
    "nan": math.nan,
}
_CONSTANTS |= {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
}


@dataclass(frozen=True, slots=True)
class Record:
    """A dataclass as it stands in the text: a name, and fields that are not checked yet."""

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict as it stands in the text, some of whose keys are no strings."""

    entries: tuple[tuple[Any, Any], ...]


def read(text: str) -> Any:
    """The value that `text` is; a dataclass becomes a Record.

    Raises:
        ValueError: `text` is not a value.
    """
    reader = Reader(text)
    value = reader.value()
    reader.end()
    return value


class Reader:
    """Read parts of a line one after the other; raise ValueError for an unexpected part.

    Args:
        text: the line.
        nodes: what names such as `%mm` stand for.
    """

    def __init__(self, text: str, nodes: Mapping[str, fx.Node] | None = None) -> None:
        self._tokens: list[str] = _TOKEN.findall(text)  # "" is the end
        if "" in self._tokens[:-1]:
            rest = next(match[0] for match in _TOKEN.finditer(text) if match[1] is None)
            raise ValueError(f"nothing begins with {(rest.lstrip(' ') or rest)[0]!r}")
        self._tokens.append("")  # so that each token has a next one
        self._next = 0
        self._depth = 0
        self._nodes = nodes or {}

    def sees(self, kind_or_text: str) -> bool:
        """Whether the next token is of this kind, or is this sign or name."""
        token = self._tokens[self._next]
        return kind_or_text == token or kind_or_text == _kind(token)

    def skip(self, kind_or_text: str) -> bool:
        """Whether the next token is this; if it is, it is read."""
        seen = self.sees(kind_or_text)
        self._next += seen
        return seen

    def take(self, kind_or_text: str) -> str:
        """Read the next token, which has to be this."""
        token = self._tokens[self._next]
        if kind_or_text not in (token, _kind(token)):
            raise ValueError(f"expected {kind_or_text} and found {_shown(token)}")
        self._next += 1
        return token

    def end(self) -> None:
        """Nothing may follow."""
        if not self.sees("end"):
            raise ValueError(f"nothing may follow before {self._tokens[self._next]}")

    def string(self) -> str:
        text: str = _atom(self.take("string"))
        return text

    def value(self) -> Any:
        """The next value."""
        token = self._tokens[self._next]
        kind = _kind(token)
        if kind == "sign":
            match token:
                case "[":
                    return self._items("[", "]", self.value)
                case "(":
                    return tuple(self._items("(", ")", self.value))
                case "{":
                    pairs = self._items("{", "}", self._pair)
                    if all(type(key) is str for key, _ in pairs):
                        return dict(pairs)
                    return Pairs(tuple(pairs))
        self._next += 1
        if kind == "node":
            if token[1:] not in self._nodes:
                raise ValueError(f"nothing is called {token} before this line")
            return self._nodes[token[1:]]
        if kind == "name" and self._tokens[self._next] == "(":
            return self._called(token)
        return _atom(token)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in the brackets of a call: values, then named ones."""
        positional: list[Any] = []
        named: dict[str, Any] = {}

        def argument() -> None:
            if self._tokens[self._next + 1] != "=":
                if named:
                    raise ValueError("an argument without a name follows one with a name")
                positional.append(self.value())
                return
            name = self.take("name")
            self._next += 1
            if name in named:
                raise ValueError(f"{name} is given twice")
            named[name] = self.value()

        self._items("(", ")", argument)
        return tuple(positional), named

    def _called(self, name: str) -> Any:
        """The value that a call of that name stands for."""
        positional, named = self.arguments()
        match name, positional:
            case "complex", (float(real), float(imaginary)) if not named:
                return complex(real, imaginary)
            case "slice", (start, stop, step) if not named:
                return slice(start, stop, step)
            case "device", (str(text),) if not named:
                return device_named(text)
            case "opaque", (str(text),):
                raise ValueError(f"{text} is a Python object, of which a text has only the name")
            case _, ():
                return Record(name, named)
        raise ValueError(f"these are no fields of {name}")

    def _pair(self) -> tuple[Any, Any]:
        key = self.value()
        self.take(":")
        return key, self.value()

    def _items(self, start: str, stop: str, item: Callable[[], T]) -> list[T]:
        """Items between brackets; a comma separates two, and may follow the last."""
        self.take(start)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} brackets in brackets")
        items = []
        while self._tokens[self._next] != stop:
            items.append(item())
            if self._tokens[self._next] != ",":
                break
            self._next += 1
        self.take(stop)
        self._depth -= 1
        return items


@lru_cache(maxsize=1 << 14)
def _kind(token: str) -> str:
    return _KINDS.get(token[:1]) or ("tensor" if "[" in token else "name")


def _shown(token: str) -> str:
    return token or "the end of the line"


@lru_cache(maxsize=1 << 14)  # a text has few, and each of them often
def _atom(token: str) -> Any:
    """The value that is one token, and the same in each text."""
    match _kind(token):
        case "string":
            return json.loads(token)
        case "number":
            return float(token) if set(token) & set(".ein") else int(token)
        case "tensor":
            return Layout.parse(token)
        case "name" if token in _CONSTANTS:
            return _CONSTANTS[token]
        case "name":
            raise ValueError(f"{token} is not a value")
    raise ValueError(f"expected a value and found {_shown(token)}")
