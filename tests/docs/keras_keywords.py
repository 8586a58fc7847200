"""Write the keywords that the setters of extended Keras models take as a table in Markdown."""


def keywords_table() -> str:
    """Every keyword, once for all setters that take it, with its values and its effect."""
    from ipu_dynamo.keras.settings.keyword_tables import RECORDED, TABLES

    rows: dict[tuple[str, str, str], list[str]] = {}
    recorded: dict[str, None] = {}
    for table in TABLES:
        for name, keyword in table.known.items():
            if keyword.effect == RECORDED:
                recorded[name] = None
                continue
            setters = rows.setdefault((name, keyword.values, keyword.effect), [])
            setters.append(table.setter.removeprefix("set_").removesuffix("_options"))
    lines = [
        f"| `{name}` | {', '.join(setters)} | {values} | {effect} |"
        for (name, values, effect), setters in rows.items()
    ]
    names = ", ".join(f"`{name}`" for name in recorded)
    header = ["", "| Keyword | `set_..._options` | Values | Effect |", "|---|---|---|---|"]
    return "\n".join([*header, *lines, "", f"Kept without effect: {names}.", "", ""])
