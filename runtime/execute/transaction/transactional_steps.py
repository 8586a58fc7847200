"""Run the steps of a call, each of which happens as a whole or not at all."""

from collections.abc import Sequence

import torch

from ipu_dynamo.program import Copy, Plain, Program
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.memory.step_records import StepRecords
from ipu_dynamo.runtime.execute.memory.storage import Storage
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.step_end import Numbers, StepEnd
from ipu_dynamo.runtime.execute.tasks.micro_batch_loop import MicroBatchLoop
from ipu_dynamo.runtime.execute.timeline import Timeline
from ipu_dynamo.runtime.execute.transaction.deferred_signals import DeferredSignals
from ipu_dynamo.runtime.execute.transaction.rollback import transaction_of
from ipu_dynamo.runtime.update.rounding import StochasticRounding


class TransactionalSteps:
    """What comes before the micro-batches of a step, and its commit after them.

    Args:
        program: what runs, with the registers of `storage`.
        iterations: device iterations of a call.
        devices: of the IPUs.
        memory: where variables are loaded from and stored.
        guard_updates: keep copies of what updates write until they are complete.

    Attributes:
        transaction: what has become of the last step.
    """

    def __init__(
        self,
        program: Program,
        storage: Storage,
        iterations: int,
        *,
        devices: Sequence[torch.device],
        memory: StreamingMemory,
        guard_updates: bool,
    ) -> None:
        cut, self._rounding = sections(program), StochasticRounding()
        self._storage = storage
        self._steps, self._iterations = cut.steps, iterations // cut.steps

        def prepared(instructions: Sequence[Plain]) -> StepEnd:
            tensors = storage.of_replicas()
            return StepEnd(program, instructions, tensors, devices, self._rounding, memory)

        self._begin = prepared([i for i in cut.before if not isinstance(i, Copy)])
        self.end = prepared(cut.after)
        self.transaction = transaction_of(
            program,
            program.replicas,
            storage.tensor,
            self.end.lasting,
            guard=guard_updates,
            reload=self.end.reload_states,
        )
        self._signals = DeferredSignals()

    def __call__(
        self,
        loop: MicroBatchLoop,
        numbers: Numbers,
        streams: HostStreams,
        timeline: Timeline | None,
        records: StepRecords | None = None,
        *,
        seed: int,
        first: int,
    ) -> None:
        """Run the steps of a call; all of its micro-batches, when there are none.

        Args:
            loop: the micro-batches.
            records: keeps what variables hold before and after each update.
            seed: of the random streams.
            first: number of the first device iteration that `transaction` counts.
        """
        for step in range(self._steps):
            try:
                self.transaction.begin()
                self._begin.prepare(numbers)
                loop(step, streams, timeline)
                if records is not None:
                    records.note("before", step, self._storage.tensor)
                self._commit(numbers, seed, first)
                if records is not None:
                    records.note("after", step, self._storage.tensor)
            except BaseException:
                with self._signals:
                    self.transaction.recover()
                raise

    def _commit(self, numbers: Numbers, seed: int, first: int) -> None:
        """Make a step complete, once its micro-batches have run."""
        transaction, end = self.transaction, self.end
        if not end.commits:
            transaction.complete(self._iterations)
            return
        self._rounding.begin(seed=seed, step=first + transaction.steps)
        end.prepare(numbers)
        with self._signals:
            transaction.commit()
            try:
                end.write()
                end.clear()
            except Exception as error:
                raise transaction.failure(error) from error
            transaction.complete(self._iterations)
