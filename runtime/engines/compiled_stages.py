"""Find the machine code of a stage: in memory, on disk, or by compiling it."""

import logging
import pickle
from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.program import Function
from ipu_dynamo.program.recipe import Recipe
from ipu_dynamo.runtime.engines.private.inductor import (
    MachineCode,
    compile_artifact,
    inductor_folder,
    load_artifact,
)
from ipu_dynamo.tune.artifact_store import Entry, StageStore, open_store

log = logging.getLogger(__name__)
Origin = Literal["memory", "disk", "compiler"]
origins: Counter[Origin] = Counter()  # how often code came from where, in this process
_memory: dict[str, MachineCode] = {}
# What loading raises when something outside the entry has changed: a library that a kernel needs.
_STALE = (
    OSError,
    ImportError,
    AttributeError,
    RuntimeError,
    pickle.UnpicklingError,
    AssertionError,
)


def machine_code(recipe: Recipe) -> MachineCode:
    """The code of a recipe, which may run in several threads.

    Equal stages are compiled once for all processes that share a folder.
    """
    with compile_lock():
        key = recipe.key
        if key is None:
            return _counted("compiler", recipe.lowered, _compile(recipe)[0])
        if key not in _memory:
            _memory[key] = _load_or_compile(key, recipe)
        else:
            origins["memory"] += 1
        return _memory[key]


def forget() -> None:
    """Drop the code that this process keeps for the next equal stage; programs keep theirs."""
    with compile_lock():
        _memory.clear()


def _load_or_compile(key: str, recipe: Recipe) -> MachineCode:
    function = recipe.lowered
    store = None if torch.compiler.config.force_disable_caches else open_store()
    with inductor_folder(store.scratch if store else None):
        if store and (code := _loaded(store, key, function)):
            return _counted("disk", function, code)
        code, entry = _compile(recipe)
    if store and entry:
        _keep(store, key, entry)
    return _counted("compiler", function, code)


def _compile(recipe: Recipe) -> tuple[MachineCode, Entry | None]:
    function = recipe.lowered
    examples = [
        torch.zeros(()).new_empty(0) if value is None else _example(value)
        for value in (n.meta["val"] for n in function.graph.graph.find_nodes(op="placeholder"))
    ]
    settings, results = dict(recipe.settings), len(function.outputs)
    code, saved = compile_artifact(function.graph, examples, settings, results)
    return code, Entry(*saved) if saved else None


def _example(value: Tensor) -> Tensor:
    """A real tensor with the layout of a fake one."""
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    ).zero_()


def _loaded(store: StageStore, key: str, function: Function) -> MachineCode | None:
    entry = store.read(key)
    if entry is None:
        return None
    try:
        return load_artifact(entry.code, entry.kernels, len(function.outputs))
    except _STALE as error:
        log.warning("compiled stage %s does not load (%s): compiled again", key, error)
        return None


def _keep(store: StageStore, key: str, entry: Entry) -> None:
    try:
        store.write(key, entry)
    except OSError as error:  # a full disk: what was compiled runs all the same
        log.warning("a compiled stage cannot be kept in %s: %s", store.folder, error)


def _counted(origin: Origin, function: Function, code: MachineCode) -> MachineCode:
    origins[origin] += 1
    log.debug("@%s: code from %s", function.name, origin)
    return code
