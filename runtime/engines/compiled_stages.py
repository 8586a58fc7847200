"""Find the machine code of a stage: in memory, on disk, or by compiling it."""

import logging
import pickle
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import torch

from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.program import Function
from ipu_dynamo.runtime.engines.private.inductor import (
    Run,
    compile_artifact,
    inductor_folder,
    load_artifact,
)
from ipu_dynamo.runtime.engines.stage_key import stage_key
from ipu_dynamo.tune.artifact_store import Entry, StageStore, open_store

log = logging.getLogger(__name__)
Origin = Literal["memory", "disk", "compiler"]
origins: Counter[Origin] = Counter()  # how often code came from where, in this process
_memory: dict[str, Run] = {}
# What loading raises when something outside the entry has changed: a library that a kernel needs.
_STALE = (
    OSError,
    ImportError,
    AttributeError,
    RuntimeError,
    pickle.UnpicklingError,
    AssertionError,
)


def machine_code(
    function: Function, examples: list[torch.Tensor], settings: Mapping[str, object]
) -> Run:
    """A callable on tensors laid out as `examples`, which may run in several threads.

    Equal stages are compiled once for all processes that share a folder.
    """
    with compile_lock():
        key = stage_key(function, settings)
        if key is None:
            return _counted(
                "compiler", function, compile_artifact(function.graph, examples, settings)[0]
            )
        if key not in _memory:
            _memory[key] = _load_or_compile(key, function, examples, settings)
        else:
            origins["memory"] += 1
        return _memory[key]


def forget() -> None:
    """Drop the code that this process keeps for the next equal stage; programs keep theirs."""
    with compile_lock():
        _memory.clear()


def _load_or_compile(
    key: str, function: Function, examples: list[torch.Tensor], settings: Mapping[str, object]
) -> Run:
    store = None if torch.compiler.config.force_disable_caches else open_store()
    with inductor_folder(store.scratch if store else None):
        if store and (run := _loaded(store, key)):
            return _counted("disk", function, run)
        run, entry = compile_artifact(function.graph, examples, settings)
    if store and entry:
        _keep(store, key, Entry(*entry))
    return _counted("compiler", function, run)


def _loaded(store: StageStore, key: str) -> Run | None:
    entry = store.read(key)
    if entry is None:
        return None
    try:
        return load_artifact(entry.code, entry.kernels)
    except _STALE as error:
        log.warning("compiled stage %s does not load (%s): compiled again", key, error)
        return None


def _keep(store: StageStore, key: str, entry: Entry) -> None:
    try:
        store.write(key, entry)
    except OSError as error:  # a full disk: what was compiled runs all the same
        log.warning("a compiled stage cannot be kept in %s: %s", store.folder, error)


def _counted(origin: Origin, function: Function, run: Run) -> Run:
    origins[origin] += 1
    log.debug("@%s: code from %s", function.name, origin)
    return run
