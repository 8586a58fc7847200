"""Keep measurements of this machine in files, one for each question.

A measurement decides which code runs, and so the last bits of results. Therefore the first complete
answer stays, for all later processes, until its file is removed.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ipu_dynamo.tune.artifact_store import keep_first, replace_file, sealed, unsealed

log = logging.getLogger(__name__)
Figures = Mapping[str, Mapping[str, float]]


def kept_figures(
    path: Path, machine: str, things: Collection[str], measure: Callable[[], Figures]
) -> Figures | None:
    """Seconds of each way to do each of `things`, from `path`, or measured now and written there.

    None if they cannot be kept: another process would then measure, and choose, something else.
    """
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        log.warning("nothing that is measured can be kept in %s: %s", path.parent, error)
        return None
    try:
        return _read(path, machine, things)
    except FileNotFoundError:
        keep = keep_first
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%s): it is measured again", path, error)
        keep = replace_file
    try:
        keep(path, _written(measure(), machine))
        return _read(path, machine, things)
    except OSError as error:  # a full disk: figures that are not kept must not decide
        log.warning("what was measured cannot be kept in %s: %s", path.parent, error)
        return None


def _written(figures: Figures, machine: str) -> bytes:
    return sealed(json.dumps({"machine": machine, "seconds": figures}, indent=1))


def _read(path: Path, machine: str, things: Collection[str]) -> Figures:
    """Read the figures of a file.

    Raises:
        ValueError, KeyError, TypeError: it is not as it was written.
    """
    content = json.loads(unsealed(path.read_bytes()))
    if content["machine"] != machine:
        raise ValueError("it is another machine's")
    return {thing: content["seconds"][thing] for thing in things}
