"""Open files without a name: they are gone with the last process that has them open."""

import os
import tempfile


def in_memory() -> int:
    """The descriptor of an empty file in memory, or on the disk where there are no such files."""
    return os.memfd_create("poptorch_data") if hasattr(os, "memfd_create") else on_disk()


def on_disk() -> int:
    """The descriptor of an empty file in the folder for temporary ones."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
