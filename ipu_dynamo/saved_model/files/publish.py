"""Let files appear, each as a whole: absent, old or complete, also if the process is killed."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from ipu_dynamo.saved.replace_file import replacing


def publish(files: Mapping[Path, bytes | Path]) -> None:
    """Write files in the order in which they are listed.

    Args:
        files: content by path, or where the content is.

    Raises:
        OSError: one cannot be written; those before it are there.
    """
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as target:
            if isinstance(content, bytes):
                target.write(content)
            else:
                with content.open("rb") as source:
                    shutil.copyfileobj(source, target)
