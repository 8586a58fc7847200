"""Find the machine code of stages: in memory, on disk, or by compiling it."""

import logging
import pickle
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.profiling import recording
from ipu_dynamo.program import Function
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.progress import begin, code_comes_from
from ipu_dynamo.runtime.engines.kernel_units import compile_kernels
from ipu_dynamo.runtime.engines.lowering_job import load_lowered, lower
from ipu_dynamo.runtime.engines.lowering_pool import LoweringPool
from ipu_dynamo.runtime.engines.private.allocating_code import allocating
from ipu_dynamo.runtime.engines.private.inductor import (
    InductorError,
    Lowered,
    MachineCode,
    inductor_folder,
    load_artifact,
)
from ipu_dynamo.runtime.engines.private.promised_kernels import Promise
from ipu_dynamo.runtime.engines.replay.native_library import native_library
from ipu_dynamo.runtime.engines.sent_functions import OtherCode, SentFunctions
from ipu_dynamo.tune.artifact_store import CACHE_DIR, StageArtifact, open_store

log = logging.getLogger(__name__)
Origin = Literal["memory", "disk", "compiler"]
origins: Counter[Origin] = Counter()  # how often code came from where, in this process
_memory: dict[str, MachineCode] = {}
# Errors of loading after a change outside the entry, for example of a library that a kernel needs.
_STALE = (
    OSError,
    ImportError,
    AttributeError,
    RuntimeError,
    pickle.UnpicklingError,
    AssertionError,
)


class Allocations:
    """Code of recipes that this process has, which computes nothing: see `allocating`."""

    def __init__(self) -> None:
        self.complete = True  # whether the code of all that was asked for is known

    def failed(self, recipe: FunctionRecipe) -> bool:
        """Whether a recipe has no code; none is known not to."""
        return False

    def code_of(self, recipe: FunctionRecipe) -> MachineCode | None:
        """What the code of a recipe allocates and frees."""
        code = None if recipe.key is None else _memory.get(recipe.key)
        run = None if code is None else allocating(code.run)
        if code is None or run is None:
            self.complete = False
            return None
        return replace(code, run=run)


class MachineCodes:
    """Code of recipes, compiled together.

    Equal stages are compiled once for all processes that share a folder. The results of `code_of`
    may run in several threads, once `complete` has been called.

    Attributes:
        problems: of functions that cannot be compiled, by name, in the compiler's words.
    """

    def __init__(self) -> None:
        self._store = None if torch.compiler.config.force_disable_caches else open_store()
        if self._store:
            self._store.remove_abandoned()
        self._lowered: dict[str | int, tuple[FunctionRecipe, Lowered]] = {}
        self._ahead: dict[str | int, Lowered] = {}  # before they were asked for
        self._failed: set[str | int] = set()
        self.problems: dict[str, str] = {}
        self._pool: LoweringPool | None = None

    def begin(self, recipes: Iterable[FunctionRecipe]) -> None:
        """Lower recipes in further processes if that is worth it; `code_of` is asked for them."""
        self._pool = LoweringPool.worth_it(filter(self._is_new, recipes))

    def code_of(self, recipe: FunctionRecipe) -> MachineCode | None:
        """The code of a recipe, whose kernels may still have to be compiled.

        None: Inductor generates none.
        """
        key, function = recipe.key, recipe.lowered
        if key in _memory:
            return _counted("memory", function, _memory[key])
        if _name(recipe) in self._lowered:
            return _counted("memory", function, self._lowered[_name(recipe)][1].code)
        if key and (code := self._loaded(key, function)):
            _memory[key] = code
            return _counted("disk", function, code)
        try:
            lowered = self._lower(recipe)
        except InductorError as error:
            self._fails(recipe, "Inductor fails on its graph", str(error))
            log.debug("@%s", function.name, exc_info=error)
            return None
        self._lowered[_name(recipe)] = recipe, lowered
        return _counted("compiler", function, lowered.code)

    def complete(self) -> None:
        """Compile the kernels of everything that was lowered, and keep it."""
        self.close()
        promises = [
            kernel
            for _, lowered in self._lowered.values()
            for kernel in lowered.kernels.values()
            if isinstance(kernel, Promise)
        ]
        if promises:
            begin("compiler")
        with recording.span("compile and load kernels", "job", kernels=len(promises)):
            failed = compile_kernels(promises, self._scratch, self._library)
        for recipe, lowered in self._lowered.values():
            if broken := [of for of in lowered.kernels.values() if of in failed]:
                problem = f"no compiler takes its kernel {broken[0].kernel.symbol}"
                self._fails(recipe, problem, broken[0].problem)
            elif recipe.key:
                _memory[recipe.key] = lowered.code
                self._keep(recipe.key, lowered)

    def close(self) -> None:
        """End the further processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _is_new(self, recipe: FunctionRecipe) -> bool:
        key = recipe.key
        return key is not None and key not in _memory and not (self._store and self._store.has(key))

    def _lower(self, recipe: FunctionRecipe) -> Lowered:
        """Lower a recipe, or take it from a process. While that is at it, lower others here."""
        key, pool = recipe.key, self._pool
        if ahead := self._ahead.pop(_name(recipe), None):
            return ahead
        if key is None or pool is None or pool.begin(key):
            return lower(recipe)
        while pool.is_begun(key) and (other := pool.begin()):
            with suppress(InductorError):  # it comes again when this recipe is asked for
                self._ahead[_name(other)] = lower(other)
        if saved := pool.made(key):
            try:
                return load_lowered(saved, recipe)
            except _STALE as error:
                log.debug("@%s is lowered here: %s", recipe.function.name, error)
        return lower(recipe)

    @property
    def some_failed(self) -> bool:
        return bool(self._failed)

    def failed(self, recipe: FunctionRecipe) -> bool:
        """Whether there is no code of the recipe, or no compiler takes one of its kernels."""
        return _name(recipe) in self._failed

    def _fails(self, recipe: FunctionRecipe, problem: str, said: str) -> None:
        self._failed.add(_name(recipe))
        self.problems[recipe.function.name] = f"{problem}: {said}"
        log.warning(
            "@%s runs on the eager engine, operator by operator: %s (the log of ipu_dynamo, at "
            "DEBUG, has what it said)",
            recipe.function.name,
            problem,
        )

    def _loaded(self, key: str, function: Function) -> MachineCode | None:
        entry = self._store.read(key) if self._store else None
        if entry is None:
            return None
        try:
            return load_artifact(entry.code, entry.kernels, len(function.outputs))
        except _STALE as error:
            log.warning("compiled stage %s does not load (%s): compiled again", key, error)
            return None

    def _keep(self, key: str, lowered: Lowered) -> None:
        if self._store is None or lowered.saved is None:
            return
        try:
            self._store.write(key, StageArtifact(lowered.saved, lowered.libraries()))
        except OSError as error:  # a full disk: the compiled code runs all the same
            folder = self._store.folder
            log.warning("a compiled stage cannot be kept in %s: %s", folder, error)

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        if self._store:
            with self._store.building() as folder:
                yield folder
        else:
            with tempfile.TemporaryDirectory(prefix="ipu_dynamo-") as name:  # of mode 0700
                yield Path(name)

    def _library(self, path: Path) -> Path:
        """Put a compiled library where it can be loaded; after that it may be deleted.

        Its name depends on its content: a process loads only the first of libraries with one name.
        """
        if self._store:
            return self._store.keep_library(path)
        return path.rename(path.with_stem(sha256(path.read_bytes()).hexdigest()))


@contextmanager
def machine_codes(recipes: Iterable[FunctionRecipe] = ()) -> Iterator[MachineCodes]:
    """Compile the requests of the block together; other threads that compile wait.

    Args:
        recipes: that the block will ask for, as far as they are known.

    Raises:
        IpuError: no file can be written for the compiler.
    """
    with compile_lock():
        codes = MachineCodes()
        try:
            with inductor_folder(codes._store.scratch if codes._store else None):
                codes.begin(recipes)
                yield codes
                codes.complete()
        except OSError as error:  # a full disk, a folder that may only be read
            raise IpuError(
                f"what is compiled cannot be written: {error}\n"
                f"  try:  free some space, or set {CACHE_DIR} to another folder"
            ) from error
        finally:
            codes.close()


def compile_functions(message: tuple[SentFunctions, bool]) -> tuple[bool, dict[str, str]]:
    """Compile functions, and keep their code in the folder of compiled stages.

    Args:
        message: see `PendingCode`.

    Returns:
        Whether this process would make other code than the one that asks; then nothing is compiled.
        And the compiler's words, by the name of each function that cannot be compiled.
    """
    sent, replays = message
    try:
        recipes = sent.received()
    except OtherCode:
        return True, {}
    with machine_codes() as codes:
        for recipe in recipes:
            codes.code_of(recipe)
    if replays and not codes.problems:
        native_library()
    return False, codes.problems


def is_in_memory(key: str) -> bool:
    """Whether this process keeps the code with this key."""
    return key in _memory


def forget() -> None:
    """Drop the code that this process keeps for the next equal stage; programs keep theirs."""
    with compile_lock():
        _memory.clear()


def _name(recipe: FunctionRecipe) -> str | int:
    return recipe.key or id(recipe)


def _counted(origin: Origin, function: Function, code: MachineCode) -> MachineCode:
    origins[origin] += 1
    code_comes_from(origin)
    log.debug("@%s: code from %s", function.name, origin)
    return code
