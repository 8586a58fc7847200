"""Open anonymous files: the system deletes them with the last process that has them open."""

import os
import tempfile


def in_memory() -> int:
    """The descriptor of an empty file in memory, or on the disk if the system has no memfd."""
    return os.memfd_create("ipu_dynamo_batches") if hasattr(os, "memfd_create") else on_disk()


def on_disk() -> int:
    """The descriptor of an empty file in the folder for temporary files."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
