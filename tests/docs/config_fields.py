"""Write the fields of an IPUConfig as a table in Markdown: what each becomes and changes."""

from ipu_dynamo.optimum import IPUConfig
from ipu_dynamo.optimum.values.fields import Field, fields_of

_TWIN = "inference_"


def fields_table() -> str:
    """One line for each field; a field and its twin for inference are one."""
    fields = fields_of(IPUConfig)
    rows = []
    for name, field in fields.items():
        if name.removeprefix(_TWIN) in fields and name.startswith(_TWIN):
            continue
        twin = fields.get(_TWIN + name)
        names = f"`{name}`" + (f", `{_TWIN}{name}`" if twin else "")
        rows.append(f"| {names} | {_default(field)} | {_option(field)} | {_changes(field, twin)} |")
    head = "| Field | Default | Becomes | What changes |\n|---|---|---|---|"
    return "\n".join(["", head, *rows, "", ""])


def _default(field: Field) -> str:
    return f"`{field.default!r}`"


def _option(field: Field) -> str:
    if not field.option:
        return "nothing"
    return field.option if field.option.startswith("`") else f"`{field.option}`"


def _changes(field: Field, twin: Field | None) -> str:
    """What a field changes, and its twin if that is something else."""
    if twin is None or twin.changes == "the same":
        return field.changes
    return f"{field.changes}. Of inference: {twin.changes}"
