"""Let another process compile functions, while this one goes on.

The other process lowers the functions, compiles their kernels and keeps the code in the folder of
compiled stages. This process loads it from there. So nothing that runs comes by another way than
from a run of the program before.
"""

from collections.abc import Mapping, Sequence

import torch

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.ops.private.locks import fork_safe_lock
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.progress import begin
from ipu_dynamo.runtime.engines.job_process import CannotStart, JobFailed, JobProcess, ProcessDied
from ipu_dynamo.runtime.engines.replay.native_library import library_is_kept
from ipu_dynamo.runtime.engines.sent_functions import SentFunctions, can_be_sent
from ipu_dynamo.tune.artifact_store import CACHE_DIR, open_store

JOB = "ipu_dynamo.runtime.engines.compiled_stages:compile_functions"
_LOOK = 0.2  # seconds between two looks of a waiting thread


class EngineFailed(IpuError):
    """Functions cannot be compiled; the message has the words of the compiler."""


class OnlyHere(Exception):
    """Functions can be compiled in this process alone; the message has the reason."""


class PendingCode:
    """The code of functions that another process compiles now.

    Args:
        recipes: by the key of their code.
        replays: steps are recorded, and repeated by a library that is compiled, too.

    Attributes:
        keys: of the code that will be in the folder.

    Raises:
        OnlyHere: no other process can be started.
    """

    def __init__(self, recipes: Mapping[str, FunctionRecipe], *, replays: bool) -> None:
        self.keys = frozenset(recipes)
        self._lock = fork_safe_lock()
        self._failure: Exception | None = None
        self._complete = False
        message = SentFunctions.of(recipes.values()), replays
        try:
            self._process = JobProcess()
            self._process.ask(JOB, message)
        except (CannotStart, ProcessDied) as error:
            raise OnlyHere(str(error)) from error

    def ready(self) -> bool:
        """Whether the code is there.

        Raises:
            EngineFailed: it will never be.
            OnlyHere: the other process would make other code than this one.
        """
        with self._lock, DeferredSignals():  # an answer that is received in part would be lost
            if self._failure is None and not self._complete and self._process.ready():
                self._take()
        if self._failure is not None:
            raise self._failure
        return self._complete

    def wait(self) -> None:
        """Wait until `ready` returns True, or raises."""
        begin("compiler")
        while not (self._complete or self._failure or self._process.ready(_LOOK)):
            pass

    def stop(self) -> None:
        """End the other process."""
        self._process.stop()

    def _take(self) -> None:
        """Take the answer, and let the process end."""
        try:
            other, failed = self._process.answer()
            if other:
                self._failure = OnlyHere("Inductor has passes that only this process has")
            elif failed:
                self._failure = EngineFailed("\n".join(f"@{n}: {t}" for n, t in failed.items()))
        except (JobFailed, ProcessDied) as error:
            self._failure = EngineFailed(str(error))
        self._complete = self._failure is None
        self._process.stop()


def begin_compiling(recipes: Sequence[FunctionRecipe]) -> PendingCode | None:
    """Begin to compile the functions whose code is not there yet; None: all is there.

    Raises:
        OnlyHere: another process cannot compile them.
    """
    from ipu_dynamo.runtime.engines.compiled_stages import is_in_memory  # Inductor: a second

    leaves = [leaf for recipe in recipes for leaf in recipe.compiled_parts]
    if not leaves:
        return None
    store = None if torch.compiler.config.force_disable_caches else open_store()
    if store is None:
        raise OnlyHere(f"compiled code is kept in no folder: set {CACHE_DIR} to one")
    for leaf in leaves:
        name = leaf.function.name
        if leaf.key is None:
            raise OnlyHere(f"@{name} has operators, or Inductor passes, that only this process has")
        if not can_be_sent(leaf):
            raise OnlyHere(f"@{name} does not run on the CPU")
    missing = {
        leaf.key: leaf
        for leaf in leaves
        if leaf.key and not is_in_memory(leaf.key) and not store.has(leaf.key)
    }
    replays = any(recipe.replays for recipe in recipes) and not library_is_kept()
    return PendingCode(missing, replays=replays) if missing else None
