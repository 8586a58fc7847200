"""Run a program on this machine, each IPU on its torch device."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.locks import fork_safe_lock
from ipu_dynamo.program import Copy, HostProgram, Instruction, Plain, Send
from ipu_dynamo.program.ir.verify import verify
from ipu_dynamo.program.schedule.planning import schedule_of
from ipu_dynamo.program.schedule.registers import moves_of, number_slots
from ipu_dynamo.program.schedule.schedule import Schedule, Task
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import as_one, turns
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.batching import Batching, join
from ipu_dynamo.runtime.execute.bound_calls import Step, in_turns, prepare_steps, run_steps
from ipu_dynamo.runtime.execute.deferred_signals import DeferredSignals
from ipu_dynamo.runtime.execute.fused_run import LinkedRun
from ipu_dynamo.runtime.execute.host_inputs import Receiving
from ipu_dynamo.runtime.execute.rollback import transaction_of
from ipu_dynamo.runtime.execute.step_end import Numbers, StepEnd
from ipu_dynamo.runtime.execute.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.timeline import Timeline
from ipu_dynamo.runtime.execute.transfer_times import CallTimes, TransferTimes
from ipu_dynamo.runtime.execute.workers import run_side_by_side
from ipu_dynamo.runtime.lower.constant_inputs import constant_variables
from ipu_dynamo.runtime.lower.defer_accumulation import Gradients, keep_apart, side_by_side
from ipu_dynamo.runtime.lower.fuse_step import can_link
from ipu_dynamo.runtime.update.rounding import StochasticRounding
from ipu_dynamo.tune.intra_op import intra_op_threads


class Executable:
    """A program bound to the tensors of its variables.

    Invariant: variables are read and written in the tensors given at construction; between calls
    accumulators of several micro-batches are zero, and no value of a micro-batch is held. One
    call at a time may run. What an interrupted call could not put back or write, the next call
    does first, and so does `whole`.

    Args:
        host: what to run, as often as its loops say.
        tensors: for every variable, the tensor that holds it on the first replica; with a leading
            dimension over groups of replicas, where it has those. Replicated variables are shared
            by the replicas of all groups, or of theirs; the others are copied for each.
        engine: makes callables of the program's functions.
        group_of: for each replica, the input group that it reads; empty: one of its own.
        seed: of the random streams, which `seed` and `step` determine.
        workers: at most so many threads; None is one for each IPU of every replica. One runs
            the micro-batches one after the other.
        threads: intra-op threads of each worker; None is torch's number.
        devices: the torch device of every IPU, where the tensors of its variables are.
        numbers: what calls will probably have, so that what they need is compiled now.
        apart: micro-batches run side by side, and add their gradients in turn; only for a program
            that `can_keep_apart`.
        own_tensors: nobody writes the tensors without their version counters' notice, as a user
            can with `weight.data`; what only inference reads may be kept in another order, too.
        guard_updates: keep copies of what updates write until they are complete.

    Attributes:
        program, host_program: what every IPU does, and what is done for it here.
        batching: how the caller's tensors split into the micro-batches of the program's loops.
        step: device iterations completed since the seed was set, over all calls.
        schedule: which worker runs what, in which order.
        timeline: set it to record when every task runs; nothing else changes. A step that is one
            function with its update is one task.
        transfers: set it to record when tensors come from the host and go there; nothing else
            changes.
        memory: what the IPUs keep off the chip, and how many bytes went there and back.
        linked: what runs a step and its update as one function; None where these are apart.
    """

    def __init__(
        self,
        host: HostProgram,
        tensors: Mapping[str, Tensor],
        engine: Engine,
        group_of: Sequence[int] = (),
        seed: int = 0,
        workers: int | None = 1,
        threads: int | None = None,
        devices: Sequence[torch.device] = (),
        numbers: Numbers = (),
        apart: bool = False,
        own_tensors: bool = False,
        guard_updates: bool = False,
    ) -> None:
        verify(host.program)
        self.program, self.host_program = host.program, host
        program = host.inlined
        self.batching = batching = Batching.of(program, group_of)
        self.devices = tuple(devices) or (torch.device("cpu"),) * program.num_ipus
        self.seed = seed
        self._first_step = 0  # counted before the first step of this executable
        self.timeline: Timeline | None = None
        self.transfers: TransferTimes | None = None
        self.memory = StreamingMemory()
        self._rounding = StochasticRounding()
        self._unshared = [
            variable.name
            for variable in program.variables
            if not variable.replicated and variable.kind != "accumulator"
        ]
        self._apart = keep_apart(program) if apart else None
        program = self._apart.program if self._apart else program
        cut = sections(program)
        loop = cut.loop
        self._slots = number_slots(program, devices=self.devices)
        self._tensors = {v.name: tensors[v.name].detach() for v in program.variables}
        self._values = [self._bind(r) for r in range(batching.replicas)]
        self._rounds, self._per_round = cut.steps, cut.micro_batches
        self.schedule = self.schedule_for(workers)
        self._gradients: Gradients | None = None
        if self._apart:
            (turn,) = turns(program.calls)
            self.schedule = side_by_side(
                as_one(turn), micro_batches=self._per_round, workers=workers or 1
            )
            self._gradients = Gradients(self._apart, self._slots, self._tensors)
        self._threads = threads
        self._copies = moves_of(cut.before, self._slots, self.devices)  # of weights, every round
        self.linked: LinkedRun | None = None
        if engine.fuses and can_link(program) and self.devices[0].type == "cpu":
            own = {name: self.tensor(name) for name in self._tensors}
            self.linked = LinkedRun(program, engine, own, threads)
            self.linked.prepare(numbers)
        self._constants = constant_variables(program) if own_tensors else frozenset()
        self._turns = [] if self.linked else in_turns(self._prepare(loop, engine))
        self._receiving = Receiving(program, batching, self.devices)
        self._receive_slots = tuple(self._slots[name] for name in self._receiving.results)
        values = {i.stream: self._slots[i.value] for i in loop if isinstance(i, Send)}
        self._sends = [  # for every output: index, slot of its value, when it is kept
            (index, values[output.name], [k for row in batching.kept(output) for k in row])
            for index, output in enumerate(program.outputs)
        ]
        self._kept = [kept for _, _, kept in self._sends]
        self._begin = self._step_end([i for i in cut.before if not isinstance(i, Copy)])
        self._end = self._step_end(cut.after)
        self._transaction = transaction_of(
            program,
            batching.replicas,
            self.tensor,
            self._end.lasting,
            guard=guard_updates,
            reload=self._end.reload_states,
        )
        self._signals = DeferredSignals()
        self._one_call = fork_safe_lock()
        # As torch counts writes; None: a call was interrupted, what was written since is its own.
        self._versions: list[int] | None = self._own_versions()

    @property
    def step(self) -> int:
        """Device iterations completed since the seed was set, over all calls."""
        return self._first_step + self._completed

    @property
    def _completed(self) -> int:
        return self._transaction.steps + (self.linked.completed if self.linked else 0)

    def set_random_state(self, seed: int, step: int) -> None:
        """Draw from the next call on what a call draws that begins at `step` of `seed`."""
        self._settle_alone()
        self.seed, self._first_step = seed, step - self._completed

    def schedule_for(self, workers: int | None) -> Schedule:
        """How this many workers would run a step; None is one for each IPU of every replica."""
        return schedule_of(
            self.host_program.inlined,
            micro_batches=self._per_round,
            replicas=self.batching.replicas,
            workers=workers,
        )

    def tensor(self, name: str, replica: int = 0) -> Tensor:
        """The tensor that holds a variable on a replica."""
        value: Tensor = self._values[replica][self._slots[name]]
        return value

    def whole(self, name: str) -> Tensor:
        """The tensor that holds a variable on all groups of replicas, with a leading dimension
        over these; the first replica's, where there are no groups."""
        self._settle_alone()
        return self._tensors[name]

    def _settle_alone(self) -> None:
        """Do what an interrupted call has left to do, unless one is running."""
        if not self._one_call.locked():
            with self._one_call:
                self._settle()

    def _settle(self) -> None:
        """Do what an interrupted call has left to do."""
        if not (self._transaction.settled and (self.linked is None or self.linked.settled)):
            with self._signals:
                self._transaction.recover()
                if self.linked is not None:
                    self.linked.write_home()
        if self._versions is None:
            self._versions = self._own_versions()

    def check_update(self) -> None:
        """Raise as long as a failed update has left variables that nobody has written since.

        Raises:
            UpdateError: there are some; it names them.
        """
        self._settle_alone()
        self._transaction.check()

    def rewritten(self, names: Sequence[str]) -> None:
        """Take notice that variables have new values, also where their tensors were not written."""
        self._transaction.rewritten(names)

    def spread(self) -> None:
        """Copy the first replica's values to the variables that every replica has for itself."""
        for name in self._unshared:
            for replica in range(1, self.batching.replicas):
                self.tensor(name, replica).copy_(self.tensor(name))

    def _own_versions(self) -> list[int]:
        """How often the first replica's own tensors were written, as torch counts."""
        return [self.tensor(name)._version for name in self._unshared]

    def _spread_changes(self) -> None:
        """Give all replicas what the user wrote into the first one's tensors meanwhile."""
        if self._unshared and self._own_versions() != self._versions:
            self.spread()

    @property
    def last_loss_scale(self) -> float | None:
        """What the loss scale was in the last step, if the program adjusts it."""
        last = self._end.last_loss_scale
        return None if last is None else last.item()

    def reload_states(self) -> None:
        """Take notice that optimiser states were overwritten, by a checkpoint for instance."""
        self._end.reload_states()

    def __call__(self, inputs: Mapping[str, Tensor], numbers: Numbers = ()) -> dict[str, Tensor]:
        """Run one call.

        Args:
            inputs: the caller's tensor for every input stream of the host.
            numbers: for each update group, the values of its rule's hyper-parameters.

        Returns:
            The joined tensor of every output stream.

        Raises:
            InputError: a tensor does not fit its stream.
            ExecutionError: an operator failed. The program can be called again; parameters,
                buffers and optimiser state are those after the last complete step, or for
                inference those before the call.
            UpdateError: an update failed, now or before, after it had begun to write variables.
            IpuError: another call is running, in another thread or around this one.
        """
        if self._one_call.locked():
            raise IpuError(
                "another call of this executable is running, in another thread or around this one\n"
                "  try:  one call after the other, or an executable for each thread"
            )
        with self._one_call:  # whose thread waits, should another have come between
            return self._call(inputs, numbers)

    def _call(self, inputs: Mapping[str, Tensor], numbers: Numbers) -> dict[str, Tensor]:
        self._settle()
        self._transaction.check()
        self._spread_changes()
        chunks = self._receiving(inputs, seed=self.seed, step=self.step)
        host = next((tensor.device for tensor in inputs.values()), self.devices[0])
        batching = self.batching
        collected: list[list[Tensor | None]] = [
            [None] * batching.micro_batches for _ in self.program.outputs
        ]
        times = self.transfers.begin(batching.micro_batches) if self.transfers else None
        with torch.no_grad():
            try:
                self._versions = None
                if self.linked:
                    received = dict(zip(self._receiving.results, chunks, strict=True))
                    self.linked(
                        numbers, received, self._rounds, self._kept, collected, self.timeline, times
                    )
                else:
                    self._run_rounds(numbers, chunks, collected, times)
            finally:
                self._versions = self._own_versions()  # what the program wrote is each replica's
        if self.transfers and times:
            self.transfers.last = times
        return {
            output.name: join(output, [v for v in values if v is not None], batching).to(host)
            for output, values in zip(self.program.outputs, collected, strict=True)
        }

    def _run_rounds(
        self,
        numbers: Numbers,
        chunks: list[Sequence[Tensor]],
        collected: list[list[Tensor | None]],
        times: CallTimes | None,
    ) -> None:
        """Run the steps of a call; all of its micro-batches, when there are none."""
        for number in range(self._rounds):
            try:
                self._transaction.begin()
                self._begin.prepare(numbers)
                self._run_round(number, chunks, collected, times)
                self._commit(numbers)
            except BaseException:
                with self._signals:
                    self._transaction.recover()
                raise

    def _commit(self, numbers: Numbers) -> None:
        """Make a step complete, once its micro-batches have run."""
        steps = self.batching.iterations // self._rounds
        if not self._end.commits:
            self._transaction.complete(steps)
            return
        self._rounding.begin(seed=self.seed, step=self.step)
        self._end.prepare(numbers)
        with self._signals:
            self._transaction.commit()
            try:
                self._end.write()
                self._end.clear()
            except Exception as error:
                raise self._transaction.failure(error) from error
            self._transaction.complete(steps)

    def _run_round(
        self,
        number: int,
        chunks: list[Sequence[Tensor]],
        collected: list[list[Tensor | None]],
        times: CallTimes | None,
    ) -> None:
        """Run the micro-batches between two updates; all of the call, when there are none."""
        for move in self._copies:
            for values in self._values:
                move(values)
        replicas = self.batching.replicas
        width = self._per_round * replicas
        held: list[list[Any]] = [[] for _ in range(width)]  # values of micro-batches in flight
        ends = {turn[0].call.ipu: index for index, turn in enumerate(self._turns)}.values()
        busy = [list(ends) for _ in range(width)]  # one entry for each IPU that is not at its end

        def work(task: Task) -> None:
            place = task.micro_batch * replicas + task.replica
            position = number * width + place
            if task.call == 0:
                begin = perf_counter()
                values = held[place] = list(self._values[task.replica])
                for slot, views in zip(self._receive_slots, chunks, strict=True):
                    values[slot] = views[position]
                if times is not None:
                    times.received[position] = begin, perf_counter()
            values = held[place]
            run_steps(self._turns[task.call], values, position)
            if self._gradients:
                self._gradients.take(task.micro_batch, values)
            if task.call in ends:
                busy[place].pop()
                if not busy[place]:  # also when seen by two workers at once
                    begin = perf_counter()
                    for index, slot, kept in self._sends:
                        if kept[position // replicas]:
                            collected[index][position] = values[slot]
                    held[place] = []
                    if times is not None:
                        times.sent[position] = begin, perf_counter()

        try:
            with intra_op_threads(self._threads):
                run_side_by_side(
                    self.schedule,
                    work,
                    threads_each=torch.get_num_threads(),
                    timeline=self.timeline,
                    in_turn=self._gradients.add if self._gradients else None,
                )
        finally:
            if self._gradients:
                self._gradients.forget()

    def _bind(self, replica: int) -> list[Any]:
        values: list[Any] = [None] * (max(self._slots.values(), default=-1) + 1)
        for variable in self.program.variables:
            tensor = self._tensors[variable.name]
            if variable.groups is not None:
                tensor = tensor[variable.groups.of(self.batching.replicas)[replica]]
            elif not (replica == 0 or variable.replicated):
                tensor = tensor.clone()
            values[self._slots[variable.name]] = tensor
        return values

    def _prepare(self, loop: Sequence[Instruction], engine: Engine) -> list[Step]:
        kept = {self._slots[variable.name] for variable in self.program.variables}
        kept |= {self._slots[i.value] for i in loop if isinstance(i, Send)}
        kept |= {move.target for move in self._copies}
        program = self._apart.program if self._apart else self.host_program.inlined
        kept |= {self._slots[name] for name in self._apart.gradients} if self._apart else set()
        return prepare_steps(
            program,
            engine,
            self._slots,
            kept,
            self._threads,
            self.memory,
            self.devices,
            self._constants,
        )

    def _step_end(self, instructions: Sequence[Plain]) -> StepEnd:
        tensors = {
            name: [self.tensor(name, replica) for replica in range(self.batching.replicas)]
            for name in self._tensors
        }
        return StepEnd(
            self.program, instructions, tensors, self.devices, self._rounding, self.memory
        )
