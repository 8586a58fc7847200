"""Run the instructions before and after the micro-batches of a step.

They copy gradients to the IPUs of their parameters, sum them over replicas, and update the
parameters. They also load and store the variables in streaming memory.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import chain, zip_longest

import torch
from torch import Tensor

from ipu_dynamo.ops.private.native import foreach_copy_, foreach_zero_
from ipu_dynamo.program import (
    AdjustLossScale,
    AllGather,
    AllReduce,
    ClipFactor,
    ClipValues,
    Copy,
    GradientNorm,
    JointUpdate,
    Load,
    Plain,
    Program,
    ReceiveFromRank,
    ReduceScatter,
    SendToRank,
    Store,
    Update,
    UpdateFactors,
    UpdatePart,
)
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.program.ir.update_rules import HostStep
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.share import OwnReplicas
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.tasks.rank_streams import RankStreams
from ipu_dynamo.runtime.execute.update_steps import ParametersUpdate, RunUpdate, UpdateSteps
from ipu_dynamo.runtime.ranks.first_replica import FirstReplica
from ipu_dynamo.runtime.ranks.replica_sums import ReplicaSums
from ipu_dynamo.runtime.update.adjust_loss_scale import LossScaleAdjustment
from ipu_dynamo.runtime.update.clip_gradients import GradientNorms, clip_divisor, clip_values
from ipu_dynamo.runtime.update.gradient_scale import GradientScale
from ipu_dynamo.runtime.update.host_update import HostGradients, HostStepper, HostUpdate
from ipu_dynamo.runtime.update.rounding import HalfRounder
from ipu_dynamo.runtime.update.traced_update import TracedFactors
from ipu_dynamo.runtime.update.update_tensors import distinct

Block = Callable[[Plain], AbstractContextManager[None]]  # in which an instruction runs


class StepEnd:
    """The instructions before the loop over micro-batches or those after it, prepared.

    They run in three parts, each in the order of the program. The first part writes no variables
    except accumulators. The second writes lasting variables. The third sets accumulators to zero.
    So an error in the first part harms nothing.

    Args:
        program: the owner of the instructions.
        instructions: in order.
        tensors: for every variable, its tensor on each replica that runs here.
        replicas: those that run here.
        devices: of the IPUs.
        rounding: of updates that round at random.
        memory: where variables are loaded from and stored.
        run: makes callables of the functions of traced updates.
        factors: of traced updates, the hyperparameters that they take.
        host: makes the step of an optimiser that runs in Python.
        streams: from and to other ranks; None: there are no others.

    Attributes:
        copies: the tensors of each copy on each replica, by name.
        streams: the streams among the instructions.
    """

    def __init__(
        self,
        program: Program,
        instructions: Sequence[Plain],
        tensors: Mapping[str, Sequence[Tensor]],
        replicas: OwnReplicas,
        devices: Sequence[torch.device],
        rounding: HalfRounder,
        memory: StreamingMemory,
        run: RunUpdate | None = None,
        factors: TracedFactors | None = None,
        host: HostStepper | None = None,
        streams: RankStreams | None = None,
    ) -> None:
        self._replicas = replicas
        self._variables = {variable.name: variable for variable in program.variables}
        self._tensors = dict(tensors)
        self._devices, self._rounding, self._memory = devices, rounding, memory
        self.factors = factors
        self._host = HostUpdate(host) if host is not None else None
        if factors is not None:
            (made,) = (i for i in sections(program).before if isinstance(i, UpdateFactors))
            pairs = zip(made.results, factors.results, strict=True)
            self._tensors |= {name: [value] for name, value in pairs}
        self._steps = UpdateSteps(
            program, self._tensors, devices, rounding, run, replicas.own.start
        )
        self.copies: dict[str, Sequence[Tensor]] = {}
        self._ranks, self.streams = streams, list[SendToRank | ReceiveFromRank]()
        self._used = {n for i in instructions for n in (*i.read_names, *i.written_names)}
        self._exchanges: list[ReplicaSums | FirstReplica] = []
        self._exchanged = 0  # in this step
        self._origins: dict[str, str] = {}  # result of a copy -> its source
        self._updates: list[ParametersUpdate] = []
        self._prepare: list[Callable[[Hyperparameters], None]] = []
        self._write: list[Callable[[], None]] = []
        self._clear: list[Callable[[], None]] = []
        # of what each of these is a part; a part of no instruction is not timed
        self._prepared_for: list[Plain] = []
        self._written_for: list[Plain] = []
        self._cleared_for: list[Plain] = []
        self.lasting: dict[str, list[Tensor]] = {}  # written by the second part
        self.last_loss_scale: Tensor | None = None  # of the last step, where it is adjusted
        for instruction in instructions:
            match instruction:
                case Copy():
                    self._copy(instruction)
                case SendToRank():
                    self._send(instruction)
                case ReceiveFromRank():
                    self._receive(instruction)
                case AllReduce():
                    self._reduce(instruction)
                case ReduceScatter(values=names, shards=shards):
                    self._reduce(instruction)
                    self._count(self._memory.scatter, names, shards)
                case GradientNorm():
                    self._norm(instruction)
                case ClipFactor():
                    self._clip_factor(instruction)
                case ClipValues():
                    self._clip_values(instruction)
                case UpdatePart():
                    self._part(instruction)
                case JointUpdate():
                    self._joint(instruction)
                case Update(rule=HostStep()):
                    self._host_update(instruction)
                case Update():
                    self._update(instruction)
                case AdjustLossScale():
                    self._adjust(instruction)
                case Load(value=name):
                    self._count(self._memory.fetch, [name], self._variables[name].shards)
                case Store(value=name):
                    self._count(self._memory.write_back, [name], self._variables[name].shards)
                case AllGather(value=name, shards=shards):
                    self._count(self._memory.gather, [name], shards)
                case _:
                    raise ValueError(f"no end of a step does this: {instruction}")
            self._note(instruction)
        if factors is not None and (self._write or streams is not None):
            self._lasts(made.counters)
            self._write.append(factors.write)
            self._note(made)

    def _note(self, instruction: Plain) -> None:
        """Note the instruction that the newest parts of the step belong to."""
        for parts, of in (
            (self._prepare, self._prepared_for),
            (self._write, self._written_for),
            (self._clear, self._cleared_for),
        ):
            of += [instruction] * (len(parts) - len(of))

    @cached_property
    def commits(self) -> bool:
        """Whether there is anything to write that lasts, here or on another rank."""
        return bool(self._write or self.streams or self._exchanges)

    def prepare(self, hyperparameters: Hyperparameters, timed: Block | None = None) -> None:
        """Run the part before the first write of a lasting variable.

        Args:
            hyperparameters: of every update group.
            timed: makes a block of each instruction; None: times are not recorded.
        """
        if timed is None:
            for run in self._prepare:
                run(hyperparameters)
        else:
            for run, of in zip_longest(self._prepare, self._prepared_for):
                with nullcontext() if of is None else timed(of):
                    run(hyperparameters)

    def begin(self) -> None:
        """Begin a step with other ranks."""
        self._exchanged = 0

    def drain(self) -> None:
        """Take part in the exchanges that the step has not reached, and drop the values."""
        while self._exchanged < len(self._exchanges):
            self._exchange(self._exchanges[self._exchanged], writes=False)

    def _exchange(self, values: ReplicaSums | FirstReplica, *, writes: bool = True) -> None:
        assert self._ranks is not None
        with self._ranks.unbroken("a rank was interrupted twice in an exchange of its column"):
            self._exchanged += 1
            values.exchange(writes=writes)

    def copy_first_replica(self, values: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """Write values of the program's first replica on ranks that do not run it, too.

        Args:
            values: those of this rank's own first replica.
            copies: tensors for those of the program's first replica.
        """
        assert self._ranks is not None
        first = FirstReplica(self._ranks.transport, values, copies)
        self._exchanges.append(first)
        self._prepare.append(lambda _: self._exchange(first))
        self._write.append(first.write)

    def write(self, timed: Block | None = None) -> None:
        """Write the lasting variables, once prepared, and set accumulators to zero."""
        if timed is None:
            for run in self._write:
                run()
            for run in self._clear:  # once all is written
                run()
        else:
            for run, of in chain(
                zip_longest(self._write, self._written_for),
                zip_longest(self._clear, self._cleared_for),
            ):
                with nullcontext() if of is None else timed(of):
                    run()

    def reload_states(self) -> None:
        """Take notice that optimiser states were overwritten."""
        for update in self._updates:
            update.reload()

    def _copy(self, copy: Copy) -> None:
        sources, device = self._tensors[copy.value], self._devices[copy.dst]
        self._origins[copy.result] = copy.value
        if device == self._devices[copy.src]:
            self._made(copy.result, sources)
            return
        targets = [torch.empty_like(source, device=device) for source in sources]
        self._made(copy.result, targets)
        self._prepare.append(lambda _: foreach_copy_(targets, sources))

    def _made(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Note the tensors of a copy, which stay the same in all steps."""
        self._tensors[name] = self.copies[name] = tensors

    def _send(self, send: SendToRank) -> None:
        values, ranks = self._tensors[send.value], self._streams_of_ranks(send)
        values = values if send.each else values[:1]
        self._prepare.append(lambda _: ranks.send(send, values))
        variable = self._variables.get(send.value)
        if variable is not None and variable.kind == "accumulator":  # whose update is elsewhere
            cleared = distinct(values)
            self._clear.append(lambda: foreach_zero_(cleared))

    def _receive(self, receive: ReceiveFromRank) -> None:
        ranks, name = self._streams_of_ranks(receive), receive.result
        times = 1 if receive.each else len(self._replicas.own)
        own: list[Tensor] = []
        if name in self._used:  # instructions are bound to tensors that stay the same
            type_, device = receive.type, self._devices[receive.ipu]
            for _ in self._replicas.places if receive.each else range(1):
                tensor = torch.empty(type_.shape, dtype=type_.dtype, device=device)
                own.append(
                    tensor
                    if receive.strides is None
                    else torch.empty_strided(
                        type_.shape, receive.strides, dtype=type_.dtype, device=device
                    )
                )
            self._tensors[name] = own * times

        def run(_: Hyperparameters) -> None:
            values = ranks.receive(receive)
            if own:
                foreach_copy_(own, values)
            self.copies[name] = values * times

        self._prepare.append(run)

    def _streams_of_ranks(self, stream: SendToRank | ReceiveFromRank) -> RankStreams:
        assert self._ranks is not None, "a share has streams to other ranks"
        self.streams.append(stream)
        return self._ranks

    def _reduce(self, reduce: AllReduce | ReduceScatter) -> None:
        """Sum into the tensors of each group's first replica, for the whole group.

        Sums in shards are there, too, one shard after the other. The other replicas' tensors hold
        partial sums.
        """
        for members in self._replicas.members(reduce.groups):
            values = [
                [self._tensors[name][replica] for name in reduce.values] for replica in members
            ]
            if self._ranks is not None and reduce.groups is None:
                sums = ReplicaSums(values, self._replicas.count, self._ranks.transport)
                self._exchanges.append(sums)
            else:
                sums = ReplicaSums(values, len(members))
            self._prepare.append(partial(self._sum, sums))

    def _sum(self, sums: ReplicaSums, _: Hyperparameters) -> None:
        sums.add_own()
        if sums in self._exchanges:
            self._exchange(sums)

    def _update(self, update: Update) -> None:
        for names in (update.parameters, *(names for _, names in update.states)):
            self._lasts(names)
        places = self._distinct_copies(update.parameters)
        step = self._steps.update(update, places, partial(self._scale, update))
        self._updates.append(step)
        self._prepare.append(step.prepare)
        self._write.append(step.write)
        if update.clear:
            cleared = self._accumulators(update.gradients)
            self._clear.append(lambda: foreach_zero_(cleared))

    def _host_update(self, update: Update) -> None:
        assert self._host is not None
        self._lasts(update.parameters)
        totals: dict[str, list[Tensor]] = {}
        for place, replica in self._distinct_copies(update.parameters):
            total = self._tensors[update.gradients[place]][replica]
            totals.setdefault(update.parameters[place], []).append(total)
        grouped = frozenset(n for n in totals if self._variables[n].groups is not None)
        scale = self._scale(update, clipped=[t for of in totals.values() for t in of])
        if not self._host.parts:
            host = self._host
            self._prepare.append(lambda _: host.prepare())
            self._write.append(host.write)
        self._host.parts.append(HostGradients(totals, grouped, scale))
        if update.clear:
            cleared = self._accumulators(update.gradients)
            self._clear.append(lambda: foreach_zero_(cleared))

    def _part(self, part: UpdatePart) -> None:
        compute = self._steps.part(part, partial(self._scale, part))
        self._prepare.append(lambda _: compute())

    def _joint(self, joint: JointUpdate) -> None:
        values = self._steps.joint(joint)
        self._prepare.append(lambda _: values.compute())
        if joint.written:
            self._lasts(joint.written)
            self._write.append(values.write)

    def _scale(
        self, by: Update | UpdatePart | GradientNorm | ClipValues, clipped: Sequence[Tensor]
    ) -> GradientScale | None:
        """Return the divisor of an instruction's gradients; None for 1."""
        clip = by.clip if isinstance(by, Update | UpdatePart) else None
        names = [name for name in (by.loss_scale, clip) if name]
        if by.divisor == 1 and not names:
            return None
        wide = clip is not None and any(t.dtype == torch.float64 for t in clipped)
        return GradientScale(
            by.divisor,
            factors=[self._tensors[name][0] for name in names],
            device=self._devices[by.ipu],
            dtype=torch.float64 if wide else torch.float32,
        )

    def _norm(self, norm: GradientNorm) -> None:
        gradients = self._gradients(norm)
        result = torch.zeros((), dtype=norm.type.dtype, device=self._devices[norm.ipu])
        self._tensors[norm.result] = [result]
        scale = self._scale(norm, gradients)
        norms = GradientNorms(gradients, norm.norm_type, result, scale)
        self._prepare.append(lambda _: norms())

    def _clip_factor(self, factor: ClipFactor) -> None:
        result = torch.ones((), dtype=factor.type.dtype, device=self._devices[factor.ipu])
        self._tensors[factor.result] = [result]
        clip = clip_divisor(factor.rule, [self._tensors[name][0] for name in factor.norms], result)
        self._prepare.append(lambda _: clip())

    def _clip_values(self, clip: ClipValues) -> None:
        gradients = self._gradients(clip)
        limit = clip_values(gradients, clip.limit, self._scale(clip, gradients))
        self._prepare.append(lambda _: limit())

    def _gradients(self, of: GradientNorm | ClipValues) -> list[Tensor]:
        """The gradients of all groups of replicas, each of which has summed its own."""
        places = self._distinct_copies(of.parameters)
        return [self._tensors[of.gradients[place]][replica] for place, replica in places]

    def _distinct_copies(self, parameters: Sequence[str]) -> list[tuple[int, int]]:
        """Return the copies that differ, as (place of the parameter, replica)."""
        return [
            (place, replica)
            for place, name in enumerate(parameters)
            for replica in self._first_of_groups(name)
        ]

    def _adjust(self, adjust: AdjustLossScale) -> None:
        def number(name: str) -> Tensor:
            return self._tensors[name][0]

        since = [number(name) for name in (adjust.steps, adjust.so_far) if name]
        within = list(map(number, adjust.within))
        make_next = LossScaleAdjustment(adjust, number(adjust.scale), within, since)
        counters = self._accumulators(adjust.within)
        self.last_loss_scale = make_next.last
        self._lasts([name for name in (adjust.scale, adjust.steps, adjust.so_far) if name])
        self._write.append(make_next)
        self._clear.append(lambda: foreach_zero_(counters))

    def _lasts(self, names: Sequence[str]) -> None:
        """Note variables that are written, with all tensors that hold them."""
        for name in names:
            replicas = self._first_of_groups(name)
            self.lasting[name] = [self._tensors[name][replica] for replica in replicas]

    def _accumulators(self, names: Sequence[str]) -> list[Tensor]:
        """Return the tensors of some names on all replicas, and the originals of copies."""
        all_names = [n for name in names for n in (name, self._origins.get(name, name))]
        return distinct([tensor for name in all_names for tensor in self._tensors[name]])

    def _first_of_groups(self, name: str) -> tuple[int, ...]:
        """The first replica of every group that has a variable for itself."""
        variable = self._variables[name]
        return (0,) if variable.groups is None else self._replicas.holders(variable)

    def _count(
        self, move: Callable[[Tensor, int], None], names: Sequence[str], shards: int
    ) -> None:
        """Move variables or sums, or their shards, on every replica."""
        tensors = [tensor for name in names for tensor in self._tensors[name]]

        def run(_: Hyperparameters) -> None:
            for tensor in tensors:
                move(tensor, shards)

        self._prepare.append(run)
