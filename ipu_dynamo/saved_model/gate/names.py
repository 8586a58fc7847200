"""Check the names of a program, which PyTorch writes into Python code and walks as attributes."""

import re

from ipu_dynamo.saved_model.gate.refusal import Refusal

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,999}", re.ASCII)
_PART = re.compile(r"(?!__)[^\x00-\x1f\x7f\"'\\.]{1,500}")  # of a qualified name


def check_identifier(name: str) -> None:
    """A name of a value, that can stand in code.

    Raises:
        Refusal: it cannot.
    """
    if not _IDENTIFIER.fullmatch(name):
        raise Refusal(f"{name[:80]!r} is no name of a value")


def check_qualified_name(name: str) -> None:
    """A name of a parameter or buffer: parts with dots between, none of which leads out of it.

    Raises:
        Refusal: it is something else.
    """
    parts = name.split(".")
    if len(parts) > 100 or not all(_PART.fullmatch(part) for part in parts):
        raise Refusal(f"{name[:80]!r} is no name of a parameter or buffer")
