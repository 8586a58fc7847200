"""Load signatures of saved programs as objects to be called."""

import os
from collections.abc import Iterable

from ipu_dynamo.saved_model.directory import SavedPrograms
from ipu_dynamo.saved_model.signature import Signature


def load(
    dir: str | os.PathLike[str], tags: Iterable[str] = ("serve",), *, trust: bool = False
) -> dict[str, Signature]:
    """All signatures of a tag set, by key. Nothing of the files is run to get them.

    Args:
        dir: a saved program directory, a `.pt2` file, or a folder with one such file.
        trust: the user trusts the files: `torch.export.load` may run code in them.

    Raises:
        RuntimeError: the program does not have this tag set.
        ValueError: there is no saved program, or it is damaged or more than data.
    """
    if isinstance(tags, str):
        raise TypeError("tags are a list of texts, not a text")
    programs, names = SavedPrograms(dir, trust=trust), list(tags)
    return {key: programs.signature(names, key) for key in programs.keys(names)}


def available_tag_sets(dir: str | os.PathLike[str]) -> list[list[str]]:
    """The tag sets of a saved program, each sorted.

    Raises:
        ValueError: there is no saved program.
    """
    return SavedPrograms(dir).tag_sets()
