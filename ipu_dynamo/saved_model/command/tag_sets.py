"""Read `serve,gpu` as a set of tags."""


def tags_of(text: str) -> list[str]:
    """The tags of a comma-separated list, sorted."""
    return sorted({tag.strip() for tag in text.split(",") if tag.strip()})
