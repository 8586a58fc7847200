"""Write plain values as JSON and read them back: the text that a value gives is the only one that
it is read from."""

import json
from typing import Any

from ipu_dynamo.saved.refusal import Reason, SavedProgramError


def write_json(value: object) -> bytes:
    """`value` as JSON in ASCII.

    Raises:
        ValueError: a number is not finite, or a value is nothing that JSON has.
    """
    text = json.dumps(value, indent=1, allow_nan=False, sort_keys=True)
    return f"{text}\n".encode("ascii")


def read_json(content: bytes) -> Any:
    """Inverse of `write_json`.

    Raises:
        SavedProgramError: it is not JSON as `write_json` writes it.
    """
    try:
        value = json.loads(content.decode("ascii"))
        if write_json(value) == content:
            return value
    except RecursionError:
        raise SavedProgramError(Reason.LIMIT, "too many brackets in brackets") from None
    except ValueError as error:
        raise SavedProgramError(Reason.DAMAGED, f"it is no JSON: {error}") from error
    raise SavedProgramError(Reason.DAMAGED, "its JSON is not as this package writes it")


def expect(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """`value`, if it is of exactly one of these types.

    Raises:
        SavedProgramError: it is not.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        names = " or ".join(one.__name__ for one in kinds)
        actual = type(value).__name__
        raise SavedProgramError(Reason.CONTENT, f"{what} is a JSON {actual}, not {names}")
    return value


def fields_of(value: Any, what: str, **kinds: type | tuple[type, ...]) -> list[Any]:
    """The values of an object that has these fields and no others, in the order of `kinds`.

    Raises:
        SavedProgramError: one is missing, too many, or of another type.
    """
    expect(value, dict, what)
    if value.keys() != kinds.keys():
        odd = ", ".join(sorted(value.keys() ^ kinds.keys()))
        raise SavedProgramError(Reason.CONTENT, f"{what} lacks, or should not have: {odd}")
    return [expect(value[name], kind, f"{what}.{name}") for name, kind in kinds.items()]
