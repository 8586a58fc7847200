"""Read a list of examples, each with the values of its features, into one array per feature."""

import ast
from typing import Any

import numpy as np

LONGEST = 16 << 20
DEEPEST = 10
_KINDS = {bool: "booleans", int: "numbers", float: "numbers", str: "strings"}


def read_examples(text: str) -> dict[str, np.ndarray[Any, Any]]:
    """The features of N examples, each an array [N, length].

    Raises:
        ValueError: it is not a list of examples, or features differ between examples.
    """
    examples = _literal(text)
    if not isinstance(examples, list) or not all(isinstance(one, dict) for one in examples):
        raise ValueError(f"{text[:80]!r} is no list of examples, each a dict of features")
    if not examples:
        raise ValueError("there is no example in the list")
    first = examples[0]
    for index, example in enumerate(examples):
        if odd := example.keys() ^ first.keys():
            name = sorted(map(str, odd))[0]
            raise ValueError(f"feature {name!r} is not in all examples (see example {index})")
    return {_name(name): _feature(name, [one[name] for one in examples]) for name in first}


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"feature {name!r} has a name that is no text")
    return name


def _literal(text: str) -> Any:
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} characters of examples, of at most {LONGEST}")
    depth = 0
    quote = ""
    skip = False
    for letter in text:
        if skip:
            skip = False
        elif quote:
            skip, quote = letter == "\\", "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
            if depth > DEEPEST:
                raise ValueError(f"examples are nested more than {DEEPEST} deep")
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise ValueError(f"{text[:80]!r} is no list of examples: {error}") from error


def _feature(name: str, rows: list[Any]) -> np.ndarray[Any, Any]:
    for row in rows:
        if not isinstance(row, list):
            raise ValueError(f"feature {name!r} is a {type(row).__name__}, not a list of values")
        if len(row) != len(rows[0]):
            raise ValueError(f"feature {name!r} has {len(row)} values, and {len(rows[0])} before")
    kinds = {_KINDS.get(type(value), type(value).__name__) for row in rows for value in row}
    if len(kinds) > 1 or not kinds <= set(_KINDS.values()):
        raise ValueError(f"feature {name!r} has values of kinds {', '.join(sorted(kinds))}")
    if "strings" in kinds:
        raise ValueError(f"feature {name!r} has strings, which no input of this program takes")
    try:
        array = np.array(rows)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"feature {name!r}: {error}") from error
    if array.dtype == object:
        raise ValueError(f"feature {name!r} has a number beyond 64 bits")
    return array if array.size else array.astype(np.float32)
