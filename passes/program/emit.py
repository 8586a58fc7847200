"""Write the program: variables with owners, streams, functions, and every copy between IPUs.

Before   parts of the graph, in order, with streams and moves, and the optimiser's groups
After    a Program that says what one replica does in a call
Keeps    what the parts compute; equal parts become one function.
Source   PopTorch user guide, "Parallel execution strategies". `emit_update` writes the end of a
         step.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import ClassVar

import torch

from ipu_dynamo.capture.capture import ACCUMULATION_WEIGHT, BACKWARD, STREAMED, Joint
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.options import Options
from ipu_dynamo.passes.levels import Level, Move, Part, Partitioned, PartWrite
from ipu_dynamo.passes.program.emit_loss_scale import LossScaleEnd
from ipu_dynamo.passes.program.emit_update import StepEnd, UpdateGroup, emit_traced
from ipu_dynamo.passes.program.offload_activations import ActivationRule
from ipu_dynamo.passes.program.offload_variables import (
    gather_for_copies,
    locate_variables,
    move_after_step,
    move_before_step,
    move_in_micro_batch,
)
from ipu_dynamo.program import (
    Accumulate,
    Call,
    Copy,
    Function,
    Instruction,
    Load,
    Order,
    Program,
    Receive,
    Repeat,
    ReplicaGroups,
    Send,
    Store,
    TensorType,
    Variable,
    WriteBuffer,
    graph_outputs,
    make_function,
)
from ipu_dynamo.program.ir.constants import digest
from ipu_dynamo.program.ir.function import with_bodies
from ipu_dynamo.program.ir.layout import Layout, dense_strides
from ipu_dynamo.program.ir.made_names import made_of, on_ipu
from ipu_dynamo.program.ir.values import Kind
from ipu_dynamo.program.ir.verify.program import verify

aten = torch.ops.aten


@dataclass
class _Emitter:
    """Instructions under construction. `local[name, ipu]` is what IPU `ipu` calls a value."""

    capture: Joint
    partitioned: Partitioned
    options: Options
    groups: Sequence[UpdateGroup]
    placed: Mapping[str, int]
    owners: dict[str, int] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # variables that a micro-batch writes
    local: dict[tuple[str, int], str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    stored: dict[tuple[str, int], Store] = field(default_factory=dict)  # by value and its owner
    before: list[Instruction] = field(default_factory=list)
    micro_batch: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roles = {role.name: role for role in self.capture.placeholders}
        self.values = {role.name: node.meta["val"] for node, role in self.capture.roles().items()}
        self.sources: dict[str, tuple[int, str, TensorType]] = {}
        for part in self.partitioned.parts:
            for name in part.inputs:
                role = self.roles.get(name)
                if role is not None and role.kind not in STREAMED:
                    self.owners.setdefault(name, self.placed.get(name, part.ipu))
            for name in part.gradients:  # no operator reads it where its gradient is a constant
                self.owners.setdefault(name, self.placed.get(name, part.ipu))
            for write in part.writes:
                if write.rule == "buffer":
                    self.owners[write.target] = part.ipu
                    self.changed.add(write.target)
            for name, made in zip(part.outputs, graph_outputs(part.graph), strict=True):
                self.sources[name] = (part.ipu, source_line(made), TensorType.of(made.meta["val"]))
        parts = self.partitioned.parts
        self.readers: dict[str, list[tuple[int, Part]]] = {}  # of each value, in order
        for index, part in enumerate(parts):
            for name in dict.fromkeys(part.reads):
                self.readers.setdefault(name, []).append((index, part))
        variable_types = {name: self.variable_type(name) for name in self.owners}
        self.end = StepEnd(
            parts,
            self.options,
            self.groups,
            self.owners,
            variable_types,
            {name: self.strides(name) for name in self.owners},
            self.loss_scale(),
        )
        self.variables = self.find_variables()
        self.located = {v.name: v for v in self.variables}
        self.moves = self.partitioned.moves

    def loss_scale(self) -> LossScaleEnd | None:
        """What the end of a step does with the factor on the loss, if that is a variable."""
        scale = self.capture.loss_scale
        if scale is None:
            return None
        counters = {part.counter: part.ipu for part in self.partitioned.parts if part.counter}
        return LossScaleEnd(scale, self.options, self.owners[scale.name], counters)

    def rule(self) -> ActivationRule:
        """Which activations leave the chip."""
        return ActivationRule(self.options.strategy.liveness, self.options.locations.activations)

    def variable_type(self, name: str) -> TensorType:
        return TensorType.of(self.values[name])

    def strides(self, name: str) -> tuple[int, ...] | None:
        """How a variable lies in memory, if it is not dense."""
        layout = Layout.of(self.values[name])
        return None if layout.stride == dense_strides(layout.type.shape) else layout.stride

    def call_parts(self) -> None:
        for index, part in enumerate(self.partitioned.parts):
            for move in self.moves.loads.get(index, ()):
                self.load(move)
            arguments = tuple(self.argument(name, part.ipu) for name in part.inputs)
            weights = dict.fromkeys(write.weight for write in part.writes if write.weight)
            local = {weight: self.argument(weight, part.ipu) for weight in weights}
            self.micro_batch.append(self.call(part, arguments))
            self.micro_batch += self.writes(part, local)
            self.copy_results(index)
            self.send_results(part)
            for move in self.moves.stores.get(index, ()):
                self.store(move)

    def store(self, move: Move) -> None:
        name = self.local.get((move.value, move.owner), move.value)
        type_, source = self.moving(move)
        store = Store(name, made_of(name, "off"), type_, move.ipu, move.phase, source)
        self.stored[move.value, move.owner] = store
        self.micro_batch.append(store)

    def load(self, move: Move) -> None:
        """Load a value; from here on this is what its IPU calls it."""
        stored = self.stored[move.value, move.owner]
        name = stored.value if move.ipu == move.owner else on_ipu(stored.value, move.ipu)
        result = made_of(name, f"phase{move.until}")
        self.local[move.value, move.ipu] = result
        load = Load(stored.result, result, stored.type, move.ipu, move.phase, stored.source)
        self.micro_batch.append(load)

    def moving(self, move: Move) -> tuple[TensorType, str]:
        """Type and source of a value that is stored."""
        if move.value in self.sources:
            _, source, type_ = self.sources[move.value]
            return type_, source
        if move.value == ACCUMULATION_WEIGHT:
            return TensorType(torch.float32, ()), "the accumulation step"
        return self.variable_type(move.value), f"input {move.value}"

    def argument(self, name: str, ipu: int) -> str:
        """The name under which `ipu` has a part's input; emits what brings it there."""
        if (name, ipu) in self.local:
            return self.local[name, ipu]
        role = self.roles.get(name)
        if role is None and name != ACCUMULATION_WEIGHT:
            return name  # an accumulator, or a value that an earlier part made on this IPU
        if role is None or role.kind in STREAMED:
            result = name if not any(n == name for n, _ in self.local) else on_ipu(name, ipu)
            overlap = self.capture.report.overlaps.get(("input", name), "no_overlap")
            self.micro_batch.append(Receive(name, result, ipu, overlap))
        elif self.owners[name] == ipu or self.located[name].off_chip:
            return name
        else:
            result = on_ipu(name, ipu)
            once = name not in self.changed
            if not any(isinstance(i, Copy) and i.value == name for i in self.before):
                self.before += gather_for_copies(self.located[name])
            (self.before if once else self.micro_batch).append(
                Copy(name, result, self.variable_type(name), self.owners[name], ipu, "the weights")
            )
            if not once:
                return result
        self.local[name, ipu] = result
        return result

    def call(self, part: Part, arguments: tuple[str, ...]) -> Call:
        function = make_function(part.function_name, part.graph)
        traced = [node for node in function.operators if node.meta.get("stack_trace")]
        operators = [node for node in traced if not node.meta.get(BACKWARD)] or traced
        if function.key not in self.functions:
            self.functions[function.key] = replace(function, name=self.free_name(function.name))
        function = self.functions[function.key]
        return Call(
            function=function.name,
            ipu=part.ipu,
            stage=part.stage,
            direction=part.direction,
            arguments=arguments,
            results=part.outputs,
            source=source_line(operators[0]) if operators else "no line of the model",
            phase=part.phase,
        )

    def writes(self, part: Part, local: Mapping[str, str]) -> Iterator[Instruction]:
        """What follows a call: its sums by rule, as long as these are equal, then its buffers.

        Args:
            local: what the IPU calls the shares of means.
        """
        place = part.ipu, part.stage, part.direction

        def source(writes: Sequence[PartWrite]) -> str:
            return self.sources[writes[0].value][1]

        sums = [write for write in part.writes if write.rule != "buffer"]
        for rule, group in groupby(sums, lambda write: write.rule):
            for writes in _distinct(list(group)):
                yield Accumulate(
                    tuple(write.target for write in writes),
                    tuple(write.value for write in writes),
                    rule,
                    *place,
                    source(writes),
                    local.get(writes[0].weight or ""),
                    part.phase,
                )
        if buffers := [write for write in part.writes if write.rule == "buffer"]:
            names = tuple(write.target for write in buffers)
            values = tuple(write.value for write in buffers)
            yield WriteBuffer(names, values, *place, source(buffers), part.phase)

    def free_name(self, name: str) -> str:
        """`name`, or with a number if another function has it."""
        taken = {function.name for function in self.functions.values()}
        numbered = (f"{name}_{number}" for number in count(2))
        return name if name not in taken else next(n for n in numbered if n not in taken)

    def copy_results(self, index: int) -> None:
        """Copy a part's results to the other IPUs that read them later."""
        part = self.partitioned.parts[index]
        for name in part.outputs:
            _, source, type_ = self.sources[name]
            later = [p for place, p in self.readers.get(name, ()) if place > index]
            near = [p for p in later if not self.rule().moves(type_, part, p)]
            for ipu in dict.fromkeys(p.ipu for p in near):
                if ipu != part.ipu and (name, ipu) not in self.local:
                    self.local[name, ipu] = on_ipu(name, ipu)
                    self.micro_batch.append(
                        Copy(name, on_ipu(name, ipu), type_, part.ipu, ipu, source)
                    )

    def send_results(self, part: Part) -> None:
        streams = [(str(i), name) for i, name in enumerate(self.partitioned.returned)]
        streams += list(self.partitioned.changed.items())
        for stream, name in streams:
            if name in part.outputs:
                overlap = self.capture.report.overlaps.get(("output", stream), "no_overlap")
                send = Send(stream, name, part.ipu, self.sources[name][1], overlap)
                self.micro_batch.append(send)

    def find_variables(self) -> list[Variable]:
        options = self.options
        found = []
        for role in self.capture.placeholders:
            if role.name in self.owners and role.kind != "loss_scale":
                kind: Kind = role.kind  # type: ignore[assignment]
                own = options.replicas > 1 and role.name in self.changed
                type_ = self.variable_type(role.name)
                groups = options.replica_groups.get(role.name)
                _refuse_shared_change(role.name, groups, self.changed)
                own = own and groups is None
                tensor = self.capture.report.tensors[role.name]
                values = digest(tensor.to(type_.dtype)) if kind == "constant" else ""
                owner = self.owners[role.name]
                found.append(
                    Variable(
                        role.name,
                        type_,
                        kind,
                        owner,
                        not own,
                        values,
                        groups=groups,
                        strides=self.strides(role.name),
                    )
                )
        found += self.end.variables()
        traced = emit_traced(self.end)
        changed = frozenset((*self.changed, *(traced.lasting if traced is not None else ())))
        return locate_variables(found, options.locations, changed, options.replicas)


@dataclass(frozen=True)
class Emit:
    """The pass.

    Args:
        groups: of the optimiser, empty for inference.
        placed: IPUs of variables that another program has placed.
    """

    name: ClassVar[str] = "Emit"
    level: ClassVar[Level] = "parts"
    needed: ClassVar[str] = "it writes the program"

    options: Options
    groups: Sequence[UpdateGroup] = ()
    placed: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, partitioned: Partitioned) -> Program:
        return emit(partitioned, self.options, self.groups, self.placed)


def emit(
    partitioned: Partitioned,
    options: Options,
    groups: Sequence[UpdateGroup],
    placed: Mapping[str, int],
) -> Program:
    """Write the program of `partitioned`."""
    capture = partitioned.capture
    emitter = _Emitter(capture, partitioned, options, groups, placed)
    order = _order(capture, options)
    emitter.call_parts()
    located = emitter.located
    micro_batches = tuple(move_in_micro_batch(emitter.micro_batch, located))
    if capture.training:
        accumulate = Repeat("micro_batch", options.gradient_accumulation, micro_batches, order)
        traced = emit_traced(emitter.end)
        numbers = () if traced is None else (traced.factors(),)
        before = (*numbers, *move_before_step(located), *emitter.before)
        end = emitter.end.instructions(located)
        step = (*before, accumulate, *move_after_step(end, located))
        body: tuple[Instruction, ...] = (
            Repeat("device_iteration", options.device_iterations, step),
        )
    else:
        loop = Repeat("micro_batch", options.device_iterations, micro_batches, order)
        body = (*emitter.before, loop)
    program = Program(
        kind=capture.alone or ("training" if capture.training else "inference"),
        num_ipus=max(capture.ipus.values()) + 1,
        replicas=options.replicas,
        variables=tuple(emitter.variables),
        inputs=partitioned.inputs,
        outputs=partitioned.outputs,
        functions=with_bodies(emitter.functions.values()),
        body=body,
        io_tiles=options.io_tiles,
        update_functions=_update_functions(groups, capture.training),
    )
    verify(program)
    return program


def _update_functions(groups: Sequence[UpdateGroup], training: bool) -> tuple[Function, ...]:
    """The functions of a traced update."""
    trace = next((group.trace for group in groups), None)
    if trace is None or not training:
        return ()
    return (trace.factors, *trace.pieces.values())


def _distinct(writes: Sequence[PartWrite]) -> list[list[PartWrite]]:
    """Runs of writes in which no variable is written twice."""
    runs: list[list[PartWrite]] = [[]]
    for write in writes:
        if any(write.target == other.target for other in runs[-1]):
            runs.append([])
        runs[-1].append(write)
    return runs


def _order(capture: Joint, options: Options) -> Order:
    """How micro-batches follow each other; a lone forward or backward pass has only one."""
    several = len(set(capture.ipus.values())) > 1 and not capture.alone
    return "pipelined" if several and options.strategy.kind == "pipelined" else "sequential"


def _refuse_shared_change(
    name: str, groups: ReplicaGroups | None, changed: Collection[str]
) -> None:
    if groups is not None and groups.size > 1 and name in changed:
        raise CompileError(
            f"forward changes {name}, which every {groups} shares: each would have its own",
            hint="make groups of 1 replica",
        )
