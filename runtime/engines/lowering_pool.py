"""Lower functions in further processes, while this one lowers others.

An example with eight functions: this process lowers the first, second, third, ... A further process
lowers the eighth, seventh, ... until all are begun. All kernels become one library here, as if this
process had lowered all functions.
"""

import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Self

from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.runtime.engines.job_process import CannotStart, JobProcess, ProcessDied
from ipu_dynamo.runtime.engines.lowering_job import JOB
from ipu_dynamo.runtime.engines.private.compile_settings import most_processes
from ipu_dynamo.runtime.engines.sent_functions import SentFunctions, can_be_sent
from ipu_dynamo.tune.costs import LOWERING_AN_OPERATOR, WORTH_A_PROCESS

log = logging.getLogger(__name__)


class LoweringPool:
    """Processes that lower functions, with their results.

    Invariant: each function is begun once, by one of them or by this process. This process lowers
    those again that failed there, so that errors are as without a pool.

    Args:
        recipes: of functions with keys, which are wanted in this order.
        processes: their number.
    """

    def __init__(self, recipes: Sequence[FunctionRecipe], processes: int) -> None:
        self._left: dict[str, tuple[FunctionRecipe, SentFunctions]] = {}
        self._begun: set[str] = set()  # in a process
        self._made: dict[str, bytes | None] = {}  # None: it failed
        self._changed = threading.Condition()
        for recipe in recipes:
            assert recipe.key is not None
            self._left[recipe.key] = recipe, SentFunctions.of([recipe])
        self._processes: list[JobProcess] = []
        with suppress(CannotStart):
            while len(self._processes) < processes:
                self._processes.append(JobProcess())
        self._threads = [
            threading.Thread(target=self._serve, args=(process,), name="lowering", daemon=True)
            for process in self._processes
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def worth_it(cls, recipes: Iterable[FunctionRecipe]) -> Self | None:
        """Start processes if they save more time than they take, and the user allows some.

        `torch._inductor.config.compile_threads`, TORCHINDUCTOR_COMPILE_THREADS in the environment,
        is the number of processes with this one. By default it is the number of cores.
        """
        sendable = list({recipe.key: recipe for recipe in recipes if can_be_sent(recipe)}.values())
        operators = sum(len(recipe.lowered.operators) for recipe in sendable)
        worth = int(operators * LOWERING_AN_OPERATOR / WORTH_A_PROCESS)
        processes = min(worth, most_processes() - 1, len(sendable) - 1)
        return cls(sendable, processes) if processes > 0 else None

    def begin(self, key: str | None = None) -> FunctionRecipe | None:
        """Give the caller a function to lower, with this key or the next; None: it is taken."""
        with self._changed:
            if key is None:
                key = next(iter(self._left), None)
            return self._left.pop(key)[0] if key in self._left else None

    def is_begun(self, key: str) -> bool:
        """Whether a process is lowering a function."""
        with self._changed:
            return key in self._begun

    def made(self, key: str) -> bytes | None:
        """Wait for the result of a process that has begun; None: the caller must lower it."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._begun)
            return self._made.pop(key, None)

    def close(self) -> None:
        """End the processes."""
        with self._changed:
            self._left.clear()
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self, process: JobProcess) -> None:
        while True:
            with self._changed:
                if not self._left:
                    break
                key, (recipe, message) = self._left.popitem()  # the last
                self._begun.add(key)
            made = None
            try:
                process.ask(JOB, message)
                made = process.answer()
                log.debug("@%s: lowered by process %d", recipe.function.name, process.pid)
            except ProcessDied as error:
                log.debug("%s", error)
                break
            except Exception as error:  # it cannot be pickled, or the job has failed
                log.debug("@%s is lowered here: %s", recipe.function.name, error)
            finally:
                with self._changed:
                    self._made[key] = made
                    self._begun.discard(key)
                    self._changed.notify_all()
        process.stop()
