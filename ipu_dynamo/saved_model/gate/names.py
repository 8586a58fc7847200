"""Check the names of a program, which PyTorch writes into Python code and walks as attributes."""

import builtins
import keyword
import re

from ipu_dynamo.saved_model.gate.refusal import Refusal

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,999}", re.ASCII)
# Names with a meaning of their own in generated code. PyTorch gives none of them to a value; for a
# value named like a built-in function it appends `_`.
_TAKEN = frozenset(
    [
        *("torch", "math", "operator", "_operator", "device", "inf", "nan", "NoneType", "self"),
        *("fx_pytree", "pytree"),
        *("getattr", "setattr", "hasattr", "isinstance", "len", "range", "slice", "tuple", "list"),
        *("dict", "set", "frozenset", "int", "float", "bool", "complex", "str", "bytes"),
        *(name for name in dir(builtins) if name.startswith("_")),
    ]
)
_PART = re.compile(r"(?!__)[^\x00-\x1f\x7f\"'\\.]{1,500}")  # of a qualified name


def check_identifier(name: str, *, hides: bool = False) -> None:
    """A name of a value, that can stand in code and hides nothing there.

    Args:
        hides: whether it may be one that code uses, as names of operators' arguments may.

    Raises:
        Refusal: it cannot.
    """
    if not _IDENTIFIER.fullmatch(name):
        raise Refusal(f"{name[:80]!r} is no name of a value")
    if not hides and (keyword.iskeyword(name) or name in _TAKEN):
        raise Refusal(
            f"{name!r} is no name of a value: the code of a program uses it itself; rename the "
            f"argument and save it again",
            trusting=False,
        )


def check_qualified_name(name: str) -> None:
    """A name of a parameter or buffer: parts with dots between, none of which leads out of it.

    Raises:
        Refusal: it is something else.
    """
    parts = name.split(".")
    if len(parts) > 100 or not all(_PART.fullmatch(part) for part in parts):
        raise Refusal(f"{name[:80]!r} is no name of a parameter or buffer")
