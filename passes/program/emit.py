"""Write the program: variables with owners, streams, functions, and every copy between IPUs.

Before   parts of the graph, in order, with streams and moves
After    a Program that says what one replica does in a call, up to the sums of its gradients. All
         its variables are on the chip and whole. If the loss scale follows the size of gradients,
         their counts are brought together, and the next loss scale is written at the end of a step
Keeps    what the parts compute; equal parts become one function. The loss scale stays within the
         normal numbers of the loss's dtype, so that no start of a backward pass is infinite or zero
Source   PopTorch user guide, "Parallel execution strategies" and
         "poptorch.options._TrainingOptions.setAutomaticLossScaling".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby

import torch
from torch import fx

from ipu_dynamo.capture.capture import (
    ACCUMULATION_WEIGHT,
    BACKWARD,
    STREAMED,
    LossScale,
)
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.ops.graph_queries import makes_constant, only_looks
from ipu_dynamo.options import Options
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Move, Moves, Part, Partitioned, PartWrite
from ipu_dynamo.passes.program.offload_activations import ActivationRule
from ipu_dynamo.program import (
    Accumulate,
    AdjustLossScale,
    AllReduce,
    Call,
    Collective,
    Copy,
    Function,
    Input,
    Instruction,
    Load,
    Output,
    Program,
    Receive,
    Repeat,
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
from ipu_dynamo.program.ir.made_names import accumulator, alone, made_of, on_ipu
from ipu_dynamo.program.text.graph_text import DIRECTION

_COUNT = TensorType(torch.int64, ())
_STEPS, _SO_FAR = alone("loss_scale.steps"), alone("loss_scale.so_far")


@dataclass
class _Emitter:
    """Instructions under construction. `local[name, ipu]` is IPU `ipu`'s own name of a value.

    Args:
        held: the lasting inputs of parts, by name; those with an owner become variables.
        inputs, outputs: the streams, by name.
        sent: the value of each output, in order.
        collectives: exchanges of replicas between parts, by result.
        owners: IPUs of variables, at first of those that another program has placed.
    """

    parts: Sequence[Part]
    moves: Moves
    held: Mapping[str, Variable]
    inputs: Mapping[str, Input]
    outputs: Mapping[str, Output]
    sent: Mapping[str, str]
    collectives: Mapping[str, Collective]
    owners: dict[str, int]
    rule: ActivationRule
    changed: set[str] = field(default_factory=set)  # variables that a micro-batch writes
    local: dict[tuple[str, int], str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    stored: dict[tuple[str, int], Store] = field(default_factory=dict)  # by value and its owner
    before: list[Instruction] = field(default_factory=list)
    micro_batch: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        placed, self.owners = self.owners, {}
        self.sources: dict[str, tuple[int, str, TensorType]] = {}
        for part in self.parts:
            # no operator reads a parameter where its gradient is a constant
            for name in (*part.inputs, *part.gradients):
                if name in self.held:
                    self.owners.setdefault(name, placed.get(name, part.ipu))
            for write in part.writes:
                if write.rule == "buffer":
                    self.owners[write.target] = part.ipu
                    self.changed.add(write.target)
            for name, made in zip(part.outputs, graph_outputs(part.graph), strict=True):
                self.sources[name] = (part.ipu, source_line(made), TensorType.of(made.meta["val"]))
        self.readers: dict[str, list[tuple[int, Part]]] = {}  # of each value, in order
        for index, part in enumerate(self.parts):
            for name in dict.fromkeys(part.reads):
                self.readers.setdefault(name, []).append((index, part))

    def call_parts(self) -> None:
        for index, part in enumerate(self.parts):
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
        """Load a value; from here on its IPU uses the loaded copy."""
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
        stream = self.inputs.get(move.value)
        type_ = self.held[move.value].type if stream is None else stream.type
        return type_, f"input {move.value}"

    def argument(self, name: str, ipu: int) -> str:
        """Return the name of a part's input on `ipu`; emit the transfer if it is not there yet."""
        if (name, ipu) in self.local:
            return self.local[name, ipu]
        if name in self.collectives:
            self.micro_batch.append(self.collectives[name])
            self.local[name, ipu] = name
            return name
        if name in self.inputs:
            result = name if not any(n == name for n, _ in self.local) else on_ipu(name, ipu)
            self.micro_batch.append(Receive(name, result, ipu, self.inputs[name].overlap))
        elif self.owners.get(name, ipu) == ipu:
            return name  # it is here, or an earlier part made it on this IPU, or an accumulator
        else:
            result, type_ = on_ipu(name, ipu), self.held[name].type
            copy = Copy(name, result, type_, self.owners[name], ipu, "the weights")
            if name in self.changed:
                self.micro_batch.append(copy)
                return result
            self.before.append(copy)
        self.local[name, ipu] = result
        return result

    def call(self, part: Part, arguments: tuple[str, ...]) -> Call:
        _mark_backward(part.graph.graph)
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
            turn=part.turn,
        )

    def writes(self, part: Part, local: Mapping[str, str]) -> Iterator[Instruction]:
        """The writes after a call: sums of equal rules together, then buffers.

        Args:
            local: the names of the shares of means on the IPU.
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
        part = self.parts[index]
        for name in part.outputs:
            _, source, type_ = self.sources[name]
            later = [p for place, p in self.readers.get(name, ()) if place > index]
            near = [p for p in later if not self.rule.moves(type_, part, p)]
            for ipu in dict.fromkeys(p.ipu for p in near):
                if ipu != part.ipu and (name, ipu) not in self.local:
                    self.local[name, ipu] = on_ipu(name, ipu)
                    self.micro_batch.append(
                        Copy(name, on_ipu(name, ipu), type_, part.ipu, ipu, source)
                    )

    def send_results(self, part: Part) -> None:
        for stream, name in self.sent.items():
            if name in part.outputs:
                source, overlap = self.sources[name][1], self.outputs[stream].overlap
                self.micro_batch.append(Send(stream, name, part.ipu, source, overlap))

    def variables(self, replicas: int) -> list[Variable]:
        """The variables on their IPUs, and the accumulators."""
        found: dict[str, Variable] = {}
        for name, held in self.held.items():
            if name in self.owners:
                _refuse_shared_change(held, self.changed)
                own = replicas > 1 and name in self.changed and held.groups is None
                found[name] = replace(held, ipu=self.owners[name], replicated=not own)
        for part in self.parts:
            for name in part.gradients:
                weight = self.held[name]
                found[accumulator(name)] = Variable(
                    accumulator(name),
                    weight.type,
                    "accumulator",
                    part.ipu,
                    replicas == 1,
                    strides=weight.strides,
                )
        return list(found.values())


class Emit(Pass):
    """The pass. `placed` has the IPUs of variables that another program has placed."""

    level = "parts"
    needed = "it writes the program"

    options: Options
    placed: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, partitioned: Partitioned) -> Program:
        capture, options = partitioned.capture, self.options
        held = dict(_held(partitioned, options))
        streams = [(str(i), name) for i, name in enumerate(partitioned.returned)]
        emitter = _Emitter(
            parts=partitioned.parts,
            moves=partitioned.moves,
            held=held,
            inputs={stream.name: stream for stream in partitioned.inputs},
            outputs={stream.name: stream for stream in partitioned.outputs},
            sent=dict([*streams, *partitioned.changed.items()]),
            collectives=partitioned.collectives,
            owners=dict(self.placed),
            rule=ActivationRule(options.strategy.liveness, options.locations.activations),
        )
        emitter.call_parts()
        variables = emitter.variables(options.replicas)
        end: list[Instruction] = []
        if capture.loss_scale is not None:
            counters = {part.counter: part.ipu for part in partitioned.parts if part.counter}
            scale = _LossScale(
                capture.loss_scale, options, emitter.owners[capture.loss_scale.name], counters
            )
            variables = [v for v in variables if v.kind != "loss_scale"] + scale.variables()
            end = scale.adjustment()
        several = len(set(capture.ipus.values())) > 1 and not capture.alone
        pipelined = several and options.strategy.kind == "pipelined"
        loop = Repeat(
            "micro_batch",
            options.gradient_accumulation if capture.training else options.device_iterations,
            tuple(emitter.micro_batch),
            "pipelined" if pipelined else "sequential",
            options.strategy.order_name if pipelined and capture.training else "",
        )
        body: tuple[Instruction, ...] = (*emitter.before, loop, *end)
        if capture.training:
            body = (Repeat("device_iteration", options.device_iterations, body),)
        num_ipus = max(capture.ipus.values()) + 1
        repeats = any(function.repetitions for function in emitter.functions.values())
        asked = options.asks_to_recompute or (options.recompute_here and capture.checkpointed)
        return Program(
            kind=capture.alone or ("training" if capture.training else "inference"),
            num_ipus=num_ipus,
            replicas=options.replicas,
            variables=tuple(variables),
            inputs=partitioned.inputs,
            outputs=partitioned.outputs,
            functions=with_bodies(emitter.functions.values()),
            body=body,
            io_tiles=options.io_tiles,
            memory_proportions=options.memory_proportions(num_ipus),
            sync_pattern=options.sync_pattern,
            recomputed="default" if repeats and not asked else "asked",
        )


def _held(partitioned: Partitioned, options: Options) -> Iterator[tuple[str, Variable]]:
    """The tensors that parts read or write and that last, by name, as variables of IPU 0."""
    parts, tensors = partitioned.parts, partitioned.capture.report.tensors
    used = {name for part in parts for name in (*part.inputs, *part.gradients)}
    used |= {write.target for part in parts for write in part.writes}
    for node, role in partitioned.capture.roles().items():
        if role.name not in used or role.kind in STREAMED:
            continue
        layout = Layout.of(node.meta["val"])
        constant = role.kind == "constant"
        yield (
            role.name,
            Variable(
                role.name,
                layout.type,
                role.kind,  # type: ignore[arg-type]
                0,
                digest=digest(tensors[role.name].to(layout.type.dtype)) if constant else "",
                groups=options.replica_groups.get(role.name),
                strides=None
                if layout.stride == dense_strides(layout.type.shape)
                else layout.stride,
            ),
        )


@dataclass(frozen=True)
class _LossScale:
    """A loss scale that may change.

    Args:
        owner: IPU that begins the backward pass.
        counters: the accumulators that count, and their IPUs.
    """

    scale: LossScale
    options: Options
    owner: int
    counters: Mapping[str, int]

    def adjustment(self) -> list[Instruction]:
        """The instructions that compute the next loss scale."""
        automatic = self.options.automatic_loss_scaling
        if automatic is None:
            return []
        result: list[Instruction] = []
        local = []
        for name, ipu in self.counters.items():
            local.append(name if ipu == self.owner else on_ipu(name, self.owner))
            if ipu != self.owner:
                result.append(Copy(name, local[-1], _COUNT, ipu, self.owner, "size of gradients"))
        if self.options.replicas > 1:
            result.append(AllReduce(tuple(local), self.owner))
        limits = [torch.finfo(self.scale.dtype), torch.finfo(torch.float32)]
        micro_batches = self.options.gradient_accumulation * self.options.replicas
        several = automatic.period > 1
        adjust = AdjustLossScale(
            scale=self.scale.name,
            within=tuple(local),
            watched=self.scale.watched * micro_batches,
            share=automatic.share,
            smallest=max(limit.smallest_normal for limit in limits),
            largest=min(limit.max for limit in limits),
            ipu=self.owner,
            period=automatic.period,
            steps=_STEPS if several else None,
            so_far=_SO_FAR if several else None,
        )
        return [*result, adjust]

    def variables(self) -> list[Variable]:
        """The loss scale, its counters, and its state from step to step."""
        number = TensorType(torch.float32, ())
        found = [Variable(self.scale.name, number, "loss_scale", self.owner)]
        automatic = self.options.automatic_loss_scaling
        if automatic is not None and automatic.period > 1:
            found += [
                Variable(name, _COUNT, "loss_scale", self.owner) for name in (_STEPS, _SO_FAR)
            ]
        one = self.options.replicas == 1
        return found + [
            Variable(name, _COUNT, "accumulator", ipu, one) for name, ipu in self.counters.items()
        ]


def _mark_backward(graph: fx.Graph) -> None:
    """Mark the operators of the backward pass, which a call of both passes does not tell apart.

    Functions of other calls have the marks, too, so that equal blocks stay one function.
    """
    for node in graph.nodes:
        if node.meta.get(BACKWARD) and not only_looks(node) and not makes_constant(node):
            node.meta[DIRECTION] = "backward"


def _distinct(writes: Sequence[PartWrite]) -> list[list[PartWrite]]:
    """Runs of writes in which no variable is written twice."""
    runs: list[list[PartWrite]] = [[]]
    for write in writes:
        if any(write.target == other.target for other in runs[-1]):
            runs.append([])
        runs[-1].append(write)
    return runs


def _refuse_shared_change(variable: Variable, changed: set[str]) -> None:
    groups = variable.groups
    if groups is not None and groups.size > 1 and variable.name in changed:
        raise CompileError(
            f"forward changes {variable.name}, which every {groups} shares: each would have its "
            "own",
            hint="make groups of 1 replica",
        )
