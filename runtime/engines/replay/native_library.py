"""Compile the library that repeats recorded steps, once for each machine, and load it."""

import ctypes
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path

from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.ops.private.native import find_compiler
from ipu_dynamo.runtime.engines.compiler_process import CompilerFailed, run_compiler
from ipu_dynamo.runtime.engines.replay.native_source import SOURCE
from ipu_dynamo.runtime.engines.stage_key import this_machine
from ipu_dynamo.tune.artifact_store import StageStore, open_store, replace_file

log = logging.getLogger(__name__)
_FLAGS = ("-std=c++17", "-O2", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")


def native_library() -> ctypes.CDLL | None:
    """The library; None where no compiler makes it."""
    with compile_lock():
        store = open_store()
        return _library_in(store.folder if store else None)


def library_is_kept() -> bool:
    """Whether the library is there, and need not be compiled."""
    store = open_store()
    return store is not None and _path_in(store).is_file()


@cache
def _library_in(folder: Path | None) -> ctypes.CDLL | None:
    store = StageStore(folder) if folder else None
    path = _path_in(store) if store else None
    try:
        if path and path.is_file():
            return _loaded(path)
    except OSError as error:
        log.warning("%s does not load (%s): it is compiled again", path, error)
    try:
        with _scratch(store) as scratch:
            compiled = _compiled(scratch)
            if path is None:
                return _loaded(compiled)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(path, compiled.read_bytes())
        return _loaded(path)
    except (CompilerFailed, OSError) as error:
        log.info("small steps run by Python: %s", error)
        return None


def _compiled(folder: Path) -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C++ compiler is found")
    (folder / "replay.cpp").write_text(SOURCE, encoding="utf-8")
    run_compiler((compiler, *_FLAGS, "replay.cpp", "-o", "replay.so"), folder)
    return folder / "replay.so"


@contextmanager
def _scratch(store: StageStore | None) -> Iterator[Path]:
    if store:
        with store.building() as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="ipu_dynamo-") as name:
            yield Path(name)


def _path_in(store: StageStore) -> Path:
    return store.folder / "replay" / f"{_key()}.so"


def _key() -> str:
    return sha256(repr((SOURCE, _FLAGS, this_machine())).encode()).hexdigest()


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.ipu_replay.restype = ctypes.c_int64
    library.ipu_replay.argtypes = [
        ctypes.c_void_p,  # calls
        ctypes.c_int64,
        ctypes.c_void_p,  # operands
        ctypes.c_void_p,  # memory
        ctypes.c_int64,  # states
        ctypes.c_void_p,  # spare
        ctypes.c_int64,  # moving
        ctypes.c_void_p,  # moved
        ctypes.c_void_p,  # done
        ctypes.c_void_p,  # ends
        ctypes.c_int64,  # end
        ctypes.c_int64,  # nanoseconds
        ctypes.c_char_p,
        ctypes.c_int64,
    ]
    return library
