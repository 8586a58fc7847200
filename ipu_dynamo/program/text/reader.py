"""Read values that `literals.py` wrote, from left to right; nothing in the text is run.

Names mean something only if they are in a table here: there is no look-up in a module.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from ipu_dynamo.program.ir.layout import Layout, device_named

T = TypeVar("T")

NAME = r"[A-Za-z_][A-Za-z0-9_]*"  # of records, fields, nodes and operators
_TOKEN = re.compile(
    rf"""(?P<space>[ ]+)
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<tensor>{NAME}\[[\d,]*\](?:\{{[\d,]*\}})?(?:@{NAME}(?::\d+)?)?)
    |(?P<node>%{NAME})
    |(?P<number>-(?:inf|\d[\w.+-]*)|\d[\w.+-]*)
    |(?P<name>{NAME}(?:\.{NAME})*)
    |(?P<sign>[()\[\]{{}},:=\#])""",
    re.ASCII | re.VERBOSE,
)
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
    """A dataclass as it stands in the text: a name, and fields that nobody has checked."""

    name: str
    fields: Mapping[str, Any]


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
    """Read parts of a line one after the other; what does not fit is a ValueError.

    Args:
        text: the line.
        nodes: what names such as `%mm` stand for.
    """

    def __init__(self, text: str, nodes: Mapping[str, fx.Node] | None = None) -> None:
        self._tokens = [*_tokens(text), ("end", "the end of the line")]
        self._next = 0
        self._depth = 0
        self._nodes = nodes or {}

    def sees(self, kind_or_text: str) -> bool:
        """Whether the next token is of this kind, or is this sign or name."""
        kind, text = self._tokens[self._next]
        return kind_or_text == kind or (kind_or_text == text and kind in ("sign", "name"))

    def skip(self, kind_or_text: str) -> bool:
        """Whether the next token is this; if it is, it is read."""
        seen = self.sees(kind_or_text)
        self._next += seen
        return seen

    def take(self, kind_or_text: str) -> str:
        """Read the next token, which has to be this."""
        text = self._tokens[self._next][1]
        if not self.skip(kind_or_text):
            raise ValueError(f"expected {kind_or_text} and found {text}")
        return text

    def end(self) -> None:
        """Nothing may follow."""
        if not self.sees("end"):
            raise ValueError(f"nothing may follow before {self._tokens[self._next][1]}")

    def string(self) -> str:
        text: str = json.loads(self.take("string"))
        return text

    def value(self) -> Any:
        """The next value."""
        kind, text = self._tokens[self._next]
        match kind, text:
            case "string", _:
                return self.string()
            case "sign", "[":
                return self._items("[", "]", self.value)
            case "sign", "(":
                return tuple(self._items("(", ")", self.value))
            case "sign", "{":
                return dict(self._items("{", "}", self._pair))
        self._next += 1
        match kind:
            case "number":
                return float(text) if set(text) & set(".ein") else int(text)
            case "tensor":
                return Layout.parse(text)
            case "node" if text[1:] in self._nodes:
                return self._nodes[text[1:]]
            case "node":
                raise ValueError(f"nothing is called {text} before this line")
            case "name":
                return self._named(text)
        raise ValueError(f"expected a value and found {text}")

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What stands in the brackets of a call: values, then named ones."""
        positional: list[Any] = []
        named: dict[str, Any] = {}

        def argument() -> None:
            if self._tokens[self._next + 1 : self._next + 2] != [("sign", "=")]:
                if named:
                    raise ValueError("an argument without a name follows one with a name")
                positional.append(self.value())
                return
            name = self.take("name")
            self.take("=")
            if name in named:
                raise ValueError(f"{name} is given twice")
            named[name] = self.value()

        self._items("(", ")", argument)
        return tuple(positional), named

    def _named(self, name: str) -> Any:
        """A constant, or a call of that name."""
        if not self.sees("("):
            if name not in _CONSTANTS:
                raise ValueError(f"{name} is not a value")
            return _CONSTANTS[name]
        positional, named = self.arguments()
        match name, positional:
            case "complex", (float(real), float(imaginary)) if not named:
                return complex(real, imaginary)
            case "slice", (start, stop, step) if not named:
                return slice(start, stop, step)
            case "device", (str(text),) if not named:
                return device_named(text)
            case _, ():
                return Record(name, named)
        raise ValueError(f"these are no fields of {name}")

    def _pair(self) -> tuple[str, Any]:
        key = self.string()
        self.take(":")
        return key, self.value()

    def _items(self, start: str, stop: str, item: Callable[[], T]) -> list[T]:
        """Items between brackets; a comma stands between two, and may stand behind the last."""
        self.take(start)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} brackets in brackets")
        items = []
        while not self.sees(stop):
            items.append(item())
            if not self.skip(","):
                break
        self.take(stop)
        self._depth -= 1
        return items


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Kind and text of everything in a line but spaces."""
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"nothing begins with {text[position]!r}")
        position = match.end()
        if match.lastgroup != "space":
            yield str(match.lastgroup), match[0]
