"""Keep measurements of this machine in files, one for each question.

A measurement decides which code runs, and so the last bits of results. Therefore the first complete
answer stays, for all later processes, until its file is removed.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from pathlib import Path

from ipu_dynamo.ops.private.locks import nested_lock
from ipu_dynamo.tune.artifact_store import keep_first, open_store, replace_file, sealed, unsealed
from ipu_dynamo.tune.machine_name import machine_name

log = logging.getLogger(__name__)
Seconds = Mapping[str, Mapping[str, float]]  # of each way to do each of some things
_known: dict[Path, Seconds | None] = {}  # the answers that this process has, by file
_lock = nested_lock()


def kept_figures(
    kind: str, question: str, things: Collection[str], measure: Callable[[], Seconds]
) -> Seconds | None:
    """Seconds of each way to do each of `things`: read from a file, or measured now and kept there.

    None if they cannot be kept: another process would then measure, and choose, something else.

    Args:
        kind: the folder of questions like this one.
        question: all that decides the answer, apart from the machine.
    """
    if (store := open_store()) is None:
        return None
    machine = machine_name()
    name = sha256(f"{machine}\n{question}".encode()).hexdigest()[:32]
    path = store.folder / kind / f"{name}.json"
    with _lock:
        if path not in _known:
            _known[path] = _read_or_measured(path, machine, things, measure)
        return _known[path]


def forget() -> None:
    """Read the files again when they are needed next, as another process does."""
    _known.clear()


def _read_or_measured(
    path: Path, machine: str, things: Collection[str], measure: Callable[[], Seconds]
) -> Seconds | None:
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


def _written(figures: Seconds, machine: str) -> bytes:
    return sealed(json.dumps({"machine": machine, "seconds": figures}, indent=1))


def _read(path: Path, machine: str, things: Collection[str]) -> Seconds:
    """Read the figures of a file.

    Raises:
        ValueError, KeyError, TypeError: it is not as it was written.
    """
    content = json.loads(unsealed(path.read_bytes()))
    if content["machine"] != machine:
        raise ValueError("it is another machine's")
    return {thing: content["seconds"][thing] for thing in things}
