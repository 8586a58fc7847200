"""Run the micro-batches of a step by a schedule."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import foreach_add_
from ipu_dynamo.profiling.private.profiler import ProfilerRow
from ipu_dynamo.program import Collective, Program, Receive, ReceiveFromRank, SendToRank
from ipu_dynamo.program.deferred import Deferred
from ipu_dynamo.program.schedule.actions import AddGradients, RunPass
from ipu_dynamo.program.schedule.registers import number_registers
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.share import OwnReplicas
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.memory.storage import Storage
from ipu_dynamo.runtime.execute.memory.streaming_memory import Kept, StreamingMemory
from ipu_dynamo.runtime.execute.observer import NOBODY, Observer
from ipu_dynamo.runtime.execute.tasks.micro_batch_tasks import (
    Stages,
    TimedTask,
    bind_passes,
    bind_timed_passes,
    failure_of,
)
from ipu_dynamo.runtime.execute.tasks.rank_streams import RankStreams
from ipu_dynamo.runtime.execute.tasks.replica_exchange import ReplicaExchange
from ipu_dynamo.runtime.execute.tasks.task_code import Binding
from ipu_dynamo.runtime.execute.tasks.workers import Reports, Workers
from ipu_dynamo.runtime.execute.timed import Timed, title_of
from ipu_dynamo.tune.intra_op import intra_op_threads


class MicroBatchLoop:
    """The micro-batches between two updates; without updates, all micro-batches of a call.

    Args:
        program: the program to run.
        replicas: those that run here.
        stages: of its functions.
        drops: of every output, see `HostLink`.
        threads: intra-op threads of each worker; None is torch's number.
        devices: of the IPUs.
        memory: where stored values go.
        deferred: set if calls return gradients, which are added in the order of micro-batches.
        streams: from and to other ranks; None: no value crosses.

    Attributes:
        binding: registers and callables of the instructions.
        failed: the cycle and the number of the first pass that failed in the last step.
    """

    def __init__(
        self,
        program: Program,
        stages: Stages,
        storage: Storage,
        replicas: OwnReplicas,
        schedule: Schedule,
        drops: Sequence[bool],
        *,
        threads: int | None,
        devices: Sequence[torch.device],
        memory: StreamingMemory,
        deferred: Deferred | None,
        streams: RankStreams | None,
    ) -> None:
        cut, registers = sections(program), number_registers(program, devices=devices)
        stay = [v.name for v in program.variables]
        stay += [name for instruction in cut.before for name in instruction.made_names]
        self._gradients: _Gradients | None = None
        if deferred is not None:
            tensors = {name: storage.tensor(name) for name in deferred.accumulators}
            self._gradients = _Gradients(deferred, registers, tensors)
            stay += deferred.gradients
        receives = [i.result for i in cut.loop if isinstance(i, Receive)]
        binding = Binding(
            program,
            registers,
            {registers[name] for name in stay},
            stages,
            failure_of(program, replicas),
            received={result: place for place, result in enumerate(receives)},
            sent={o.name: (i, drops[i]) for i, o in enumerate(program.outputs)},
            devices=devices,
            replicas=len(replicas.own),
            memory=memory,
            exchanges={
                i.result: ReplicaExchange(i, replicas) if streams is None else streams.exchange(i)
                for i in cut.loop
                if isinstance(i, Collective)
            },
            posts={
                i.wire: streams.post_of(i)
                for i in cut.loop
                if streams is not None and isinstance(i, SendToRank)
            },
            takes={
                i.wire: streams.take_of(i)
                for i in cut.loop
                if streams is not None and isinstance(i, ReceiveFromRank)
            },
        )
        self.binding, self.failed = binding, tuple[int, ...]()
        ipus = {call.ipu for call in program.calls}
        own = [index for index, of in enumerate(schedule.passes) if of.ipu in ipus]
        self._tasks = dict(zip(own, bind_passes(binding), strict=bool(own)))
        self._first = own[0] if own else 0
        self._frames, self._replicas = storage.frames(registers), len(replicas.own)
        self._first_replica = replicas.own.start
        self._width = cut.micro_batches * self._replicas
        self._threads, self._schedule, self._workers = (
            threads,
            schedule,
            Workers(schedule, streams if streams is not None and streams.in_loop else None),
        )
        self._last = None if deferred is not None else _last_of_all(schedule)
        self._ends = {of.ipu: index for index, of in enumerate(schedule.passes)}.values()
        self._trains = program.kind == "training"

    def hold(self, values: Mapping[str, Sequence[Tensor]]) -> None:
        """Begin each micro-batch with these values, too: of each name, that of each replica."""
        for name, of_each in values.items():
            for frame, value in zip(self._frames, of_each, strict=True):
                frame[self.binding.registers[name]] = value

    def __call__(self, step: int, streams: HostStreams, observer: Observer) -> None:
        """Run the micro-batches of a call's step. Without an update, each is a device iteration,
        and reported as soon as all replicas have run it."""
        frames = self._frames
        replicas, width, last = self._replicas, self._width, self._last
        received, sent = streams.received, streams.sent
        tasks, gradients = self._tasks, self._gradients
        taken, left, ended = observer.received, observer.sent, observer.task_ended
        observed, passes, ends = observer is not NOBODY, self._schedule.passes, self._ends
        first, first_replica = self._first, self._first_replica
        timed, held = observer.instruction_ended, observer.values_held
        timed_tasks = self._timed if timed is not None else {}
        self.failed = ()
        in_flight: list[list[Any]] = [[]] * width  # registers of the micro-batches
        for exchange in self.binding.exchanges.values():
            exchange.clear()

        def work(worker: int, run: RunPass) -> None:
            start = perf_counter() if observed else 0.0
            replica = run.replica - first_replica
            place = run.micro_batch * replicas + replica
            position = step * width + place
            if run.index == first:
                in_flight[place] = frames[replica].copy()
                if taken is not None:
                    taken(position, (start, perf_counter()))
            try:
                if timed is None:
                    tasks[run.index](in_flight[place], position, received, sent)
                else:
                    of = passes[run.index]
                    each = partial(Timed, timed, worker, of, run)
                    with ProfilerRow(title_of(of)):
                        timed_tasks[run.index](in_flight[place], position, received, sent, each)
            except BaseException:
                self.failed = min(filter(None, (self.failed, (run.cycle, run.index))))
                raise
            if run.index == last:
                in_flight[place] = []
            if left is not None and run.index in ends:
                left(position, (perf_counter(), perf_counter()))
            if ended is not None:
                ended(worker, passes[run.index], run, (start, perf_counter()))
            if held is not None:
                held(run.replica, run.micro_batch, self._held(in_flight[place]))

        def add(worker: int, action: AddGradients) -> None:
            start = perf_counter() if observed else 0.0
            assert gradients is not None
            gradients.add(in_flight[action.micro_batch])
            in_flight[action.micro_batch] = []
            if ended is not None:
                ended(worker, passes[-1], action, (start, perf_counter()))
            if held is not None:
                held(action.replica, action.micro_batch, {})

        reports = None
        if observer.iteration_ended is not None and not self._trains:
            reports = Reports(partial(observer.iteration_ended, streams), len(tasks) * replicas)
        try:
            with intra_op_threads(self._threads):
                self._workers.run(
                    work, threads_each=torch.get_num_threads(), add=add, reports=reports
                )
        finally:
            in_flight.clear()  # else an error keeps the values of its step alive

    @cached_property
    def _timed(self) -> dict[int, TimedTask]:
        """The tasks of steps whose instructions are timed."""
        return dict(zip(self._tasks, bind_timed_passes(self.binding), strict=True))

    @cached_property
    def _makers(self) -> dict[int, int]:
        """For the register of each value of a micro-batch, the IPU that makes it first."""
        registers, makers = self.binding.registers, dict[int, int]()
        stay = {registers[variable.name] for variable in self.binding.program.variables}
        for instruction in sections(self.binding.program).loop:
            for use in instruction.makes:
                makers.setdefault(registers[use.name], use.ipu)
            for move in instruction.moves:
                if move.makes:
                    ipu = next(p for p in (move.dst, move.src) if isinstance(p, int))
                    makers.setdefault(registers[move.result], ipu)
        return {register: ipu for register, ipu in makers.items() if register not in stay}

    def _held(self, frame: Sequence[Any]) -> dict[int, int]:
        """For each IPU, the bytes of the values that a micro-batch holds; views count once."""
        nbytes, seen = dict[int, int](), set[int]()
        for register, ipu in self._makers.items() if frame else ():
            value = frame[register]
            tensor = value.tensor if isinstance(value, Kept) else value
            if tensor is not None and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                nbytes[ipu] = nbytes.get(ipu, 0) + tensor.nbytes
        return nbytes


class _Gradients:
    """Adds the gradients that passes return, in the registers of a micro-batch, to their sums.

    Args:
        tensors: of the accumulators.
    """

    def __init__(
        self, deferred: Deferred, registers: Mapping[str, int], tensors: Mapping[str, Tensor]
    ) -> None:
        seen: Counter[str] = Counter()
        self._rounds: list[tuple[list[Tensor], list[int]]] = []  # each writes a sum once
        for name, gradient in zip(deferred.accumulators, deferred.gradients, strict=True):
            if seen[name] == len(self._rounds):
                self._rounds.append(([], []))
            sums, sources = self._rounds[seen[name]]
            sums.append(tensors[name])
            sources.append(registers[gradient])
            seen[name] += 1

    def add(self, values: Sequence[Any]) -> None:
        """Add the gradients of one micro-batch."""
        for sums, sources in self._rounds:
            foreach_add_(sums, [values[register] for register in sources])


def _last_of_all(schedule: Schedule) -> int | None:
    """Return the last pass of every micro-batch; None if it runs on several workers.

    None of these knows when a micro-batch ends.
    """
    workers: dict[tuple[int, int], Set[int]] = {}
    last: dict[tuple[int, int], int] = {}
    for worker, runs in enumerate(schedule.runs):
        for run in runs:
            place = run.micro_batch, run.replica
            workers[place] = workers.get(place, set()) | {worker}
            last[place] = run.index
    ends = {*last.values()}
    return ends.pop() if len(ends) == 1 and all(len(w) == 1 for w in workers.values()) else None
