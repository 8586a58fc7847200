"""Write the fields of a dataclass as a table in Markdown, from its docstring."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass

import ipu_dynamo

_ENTRY = re.compile(r"^    (\w[\w, ]*): (.*(?:\n {6,}.*)*)", re.M)


def arguments_table(name: str) -> str:
    """The fields of `ipu_dynamo`'s class `name`, with defaults and what the docstring says."""
    kind = getattr(ipu_dynamo, name)
    known = {one.name: one for one in fields(kind)}
    rows, listed = [], []
    for names, text in _entries(inspect.getdoc(kind) or ""):
        shown = ", ".join(f"`{one}`" for one in names)
        defaults = ", ".join(dict.fromkeys(_default(known[one]) for one in names))
        rows.append(f"| {shown} | {defaults} | {text.replace('|', '/')} |")
        listed += names
    assert sorted(listed) == sorted(known), f"the docstring of {name} does not list its fields"
    return "\n".join(["", "| Option | Default | Effect |", "|---|---|---|", *rows, "", ""])


def _entries(docstring: str) -> Iterator[tuple[list[str], str]]:
    """Names and text of each entry under Args."""
    _, _, after = docstring.partition("Args:\n")
    arguments, _, _ = after.partition("\n\n")
    for match in _ENTRY.finditer(arguments):
        yield match[1].split(", "), " ".join(match[2].split())


def _default(field: Field[object]) -> str:
    """A default as it is written; none of a field that has to be given."""
    if field.default_factory is not MISSING:
        return f"`{_written(field.default_factory())}`"
    if field.default is MISSING:
        return ""
    return f"`{_written(field.default)}`".replace("'", '"')


def _written(value: object) -> str:
    """Its representation; of a dataclass only the fields that are not as by default."""
    if not is_dataclass(value):
        return repr(value)
    own = {one.name: getattr(value, one.name) for one in fields(value)}
    changed = [f"{name}={v!r}" for name, v in own.items() if v != getattr(type(value)(), name)]
    return f"{type(value).__name__}({', '.join(changed)})"
