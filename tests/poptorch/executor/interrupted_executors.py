"""Make calls of executors that a fault or a signal interrupts, and check what they leave.

Every subject has what those of the runtime's own tests have: `reset`, `call`, `check`, `steps`.
"""

import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import poptorch
from ipu_dynamo.ops.private import locks as locks_module
from ipu_dynamo.ops.private.locks import compile_lock
from poptorch.host_weights import host_lock
from poptorch.unwrapping import is_wrapped
from tests.poptorch.executor.models import Layer

SECONDS = 20.0  # a thread that waits longer waits for ever
ROWS = 3  # of a step


class Trainer:
    """An executor that trains, with its optimizer and the data of its calls.

    Args:
        steps: of a call.
    """

    def __init__(self, module: Layer, steps: int, seed: int) -> None:
        options = poptorch.Options().showCompilationProgressBar(False).deviceIterations(steps)
        self.module, self.steps = module, steps
        self.optimizer = poptorch.optim.Adam(module.parameters(), lr=0.01)
        self.executor = poptorch.trainingModel(module, options, self.optimizer)
        random = torch.Generator().manual_seed(seed)
        self.data = [torch.randn(2 * ROWS, 4, generator=random) for _ in range(2)]
        self.executor.compile(self.data[0][: steps * ROWS])

    def call(self, data: Tensor) -> Tensor:
        """One call, or one for each step if calls have a single one; the last step's loss."""
        return [self.executor(part) for part in data.split(self.steps * ROWS)][-1]

    def locks(self) -> Iterator[object]:
        if self.executor.isCompiled():
            yield self.executor._core.executable._one_call


class ExecutorSubject:
    """Executors whose calls are interrupted, and what holds after complete steps of them.

    Attributes:
        trained: which of three nested modules, from the innermost, have an executor.
        most: steps of a call.
        expected: by the number of complete steps, what is there after them: weights, then what
            the next calls return and leave.
    """

    folders = ("/poptorch/", "/ipu_dynamo/whole_step/")
    lost_in_commit = False
    trained: ClassVar[tuple[int, ...]] = (0,)

    def __init__(self) -> None:
        self._environment = pytest.MonkeyPatch()
        self._environment.setenv("IPU_DYNAMO_ENGINE", "eager")
        self._make(steps=1)
        parts = [part for t in self.trainers for part in t.data[0].split(ROWS)]
        by_part = [trainer for trainer in self.trainers for _ in range(2)]
        self.most, self.expected = len(parts), []
        for complete in range(self.most + 1):
            self.reset()
            for trainer, part in zip(by_part[:complete], parts, strict=False):
                trainer.call(part)
            self.expected.append([*self.weights(), *self.next()])
        for trainer in self.trainers:
            trainer.executor.destroy()
        self._make(steps=2)
        self.reset()

    def _make(self, steps: int) -> None:
        torch.manual_seed(0)
        inner = Layer()
        middle = Layer(inner)
        self.modules = inner, middle, Layer(middle)
        self.trainers = [Trainer(self.modules[at], steps, at) for at in self.trained]
        for trainer in self.trainers:
            trainer.call(trainer.data[1])
        self._base = self.weights()
        self._states = [trainer.optimizer.state_dict() for trainer in self.trainers]
        self._counted: list[object] = []

    def close(self) -> None:
        """End what runs beside, and let the modules go."""
        for trainer in self.trainers:
            trainer.executor.destroy()
        assert not any(map(is_wrapped, self.objects()))
        self._environment.undo()

    def objects(self) -> Iterator[object]:
        """The modules, and all their tensors."""
        yield from self.modules
        yield from self.modules[-1].parameters()

    def weights(self) -> list[Tensor]:
        """What who reads the weights sees."""
        return [value.clone() for value in self.modules[-1].parameters()]

    @property
    def steps(self) -> int:
        """Complete steps of the programs that there were after `reset`, over all calls."""
        return sum(core.executable.step for core in self._counted)

    @property
    def phase(self) -> str:
        """What the steps that run are about to do."""
        phases = {core.executable._commit.phase for core in self._counted}
        return "complete" if phases == {"complete"} else "open"

    def reset(self) -> None:
        """Write all weights and states again, as from a checkpoint; compile what is destroyed."""
        for trainer in self.trainers:
            if not trainer.executor.isCompiled():
                trainer.executor.compile(trainer.data[0][: trainer.steps * ROWS])
        with torch.no_grad():
            for weight, value in zip(self.modules[-1].parameters(), self._base, strict=True):
                weight.copy_(value)
        for trainer, state in zip(self.trainers, self._states, strict=True):
            trainer.executor.copyWeightsToDevice()
            trainer.optimizer.load_state_dict(state)
        self._counted = [trainer.executor._core for trainer in self.trainers]

    def call(self) -> None:
        """Make what is interrupted."""
        for trainer in self.trainers:
            trainer.call(trainer.data[0])

    def next(self) -> list[Tensor]:
        """What the next calls return, and the weights after them."""
        return [*(trainer.call(trainer.data[1]) for trainer in self.trainers), *self.weights()]

    def check(self, complete: int) -> None:
        """Check what holds after so many complete steps: no lock is held, and nothing is lost."""
        self.check_free()
        found = [*self.weights(), *self.next()]
        assert all(map(torch.equal, found, self.expected[complete]))
        kinds = [trainer.module for trainer in self.trainers if trainer.executor.isCompiled()]
        assert all(map(is_wrapped, kinds))

    def check_free(self) -> None:
        """Check that another thread gets each lock, and that this one counts for none as holder."""
        locks = [lock for trainer in self.trainers for lock in trainer.locks()]
        locks += [host_lock(), locks_module._looking, compile_lock()]
        queues = [trainer.executor._weights.lock for trainer in self.trainers]
        taken = []

        def take() -> None:
            for lock in locks:
                if not lock.acquire(timeout=SECONDS):
                    return
                lock.release()
            taken.extend(queue.run(lambda: True) for queue in queues)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join(SECONDS)
        assert taken == [True] * len(queues)
        me = threading.get_ident()
        assert not any(turn.thread == me for turn in tuple(locks_module._waiting))
        assert not any(queue.held_here() for queue in queues)


class TrainingBesideAnother(ExecutorSubject):
    """An executor of the innermost module, while another thread wraps the outermost one, reads all
    weights, and destroys its executor, again and again."""

    def __init__(self) -> None:
        self._ends, self._rounds, self._failed = threading.Event(), 0, []
        super().__init__()
        self._beside = threading.Thread(target=self._run, daemon=True)
        self._beside.start()

    def _run(self) -> None:
        outer = self.modules[-1]
        try:
            while not self._ends.wait(0.001):
                around = poptorch.trainingModel(outer)
                sum(value.detach().sum() for value in outer.parameters()).item()
                around.destroy()
                outer.state_dict()
                self._rounds += 1
        except BaseException as error:
            self._failed.append(error)

    def close(self) -> None:
        self._ends.set()
        self._beside.join(SECONDS)
        assert not self._failed
        super().close()

    def check(self, complete: int) -> None:
        before, end = self._rounds, time.monotonic() + SECONDS
        while self._rounds < before + 2 and not self._failed and time.monotonic() < end:
            time.sleep(0.001)
        assert not self._failed
        assert self._rounds >= before + 2, "the other thread waits for ever"
        super().check(complete)


class NestedExecutors(ExecutorSubject):
    """Executors of the innermost and the outermost module, one after the other; then weights are
    copied, and an executor of the module between them is made, used for reading, and destroyed."""

    trained = (2, 0)

    def call(self) -> None:
        super().call()
        self.trainers[0].executor.copyWeightsToHost()
        between = poptorch.trainingModel(self.modules[1])
        self.weights()
        between.destroy()

    def check(self, complete: int) -> None:
        if is_wrapped(self.modules[1]):  # what was interrupted has no other name
            self.modules[1].destroy()
        assert not is_wrapped(self.modules[1])
        super().check(complete)


class DestroyedExecutors(ExecutorSubject):
    """Two executors, the outer one of which is destroyed after both have trained."""

    trained = (2, 0)
    _begun = False

    def call(self) -> None:
        self._begun = True
        super().call()
        self.trainers[0].executor.destroy()

    def reset(self) -> None:
        if self._begun:
            self.trainers[0].executor.destroy()
            own = {id(each) for each in (self.modules[0], *self.modules[0].parameters())}
            assert not any(is_wrapped(each) for each in self.objects() if id(each) not in own)
            self._begun = False
        super().reset()
