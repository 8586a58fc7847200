"""Write the program: variables with homes, streams, functions, and every copy between IPUs.

Before   parts of the graph, in order, and the optimiser's groups
After    a Program that says what one replica does in a call
Keeps    what the parts compute; equal parts become one function.
Source   PopTorch user guide, "Gradient accumulation" and "Output mode"; spec of 3.4's reductions.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import fx

from ipu_dynamo.capture.capture import ACCUMULATION_WEIGHT, BACKWARD, Capture, Placeholder
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.options import Options
from ipu_dynamo.passes.locate_variables import (
    locate_variables,
    move_after_step,
    move_before_step,
    move_in_micro_batch,
)
from ipu_dynamo.passes.partition import Part, Partitioned, accumulator
from ipu_dynamo.passes.random_streams import draws
from ipu_dynamo.passes.stale_reads import refuse_stale_reads
from ipu_dynamo.passes.store_activations import ActivationRule, Move, Moves, store_activations
from ipu_dynamo.program import (
    MUTATED,
    Call,
    Copy,
    Function,
    Input,
    Instruction,
    Load,
    Order,
    Output,
    Program,
    Receive,
    Reduce,
    Repeat,
    ReplicaGroups,
    Returns,
    Send,
    Store,
    TensorType,
    Update,
    Variable,
    graph_outputs,
    make_function,
)
from ipu_dynamo.program.constants import digest
from ipu_dynamo.program.instructions import on_ipu
from ipu_dynamo.program.optimizers import Rule, StateSpec
from ipu_dynamo.program.values import Kind

aten = torch.ops.aten
_FROM_SHAPE = frozenset(  # read the shape and dtype of their first argument, not its values
    {
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
    }
)


class UpdateGroup(Protocol):
    """A parameter group of an optimiser, as far as a program names it."""

    @property
    def rule(self) -> Rule: ...

    @property
    def parameters(self) -> tuple[str, ...]: ...


@dataclass
class _Emitter:
    """Instructions under construction. `local[name, ipu]` is what IPU `ipu` calls a value."""

    capture: Capture
    partitioned: Partitioned
    options: Options
    groups: Sequence[UpdateGroup]
    homes: dict[str, int] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # variables that a micro-batch writes
    local: dict[tuple[str, int], str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    stored: dict[tuple[str, int], Store] = field(default_factory=dict)  # by value and its home
    moves: Moves = field(default_factory=Moves)
    before: list[Instruction] = field(default_factory=list)
    micro_batch: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roles = {role.name: role for role in self.capture.placeholders}
        self.values = {role.name: node.meta["val"] for node, role in self.capture.roles().items()}
        self.sources: dict[str, tuple[int, str, TensorType]] = {}
        for part in self.partitioned.parts:
            placeholders = part.graph.graph.find_nodes(op="placeholder")
            nodes = dict(zip(part.inputs, placeholders, strict=True))
            for name, node in nodes.items():
                role = self.roles.get(name)
                if role is None or role.kind in ("input", "random_key"):
                    continue
                self.homes.setdefault(name, self.capture.homes.get(name, part.ipu))
                if node.meta.get(MUTATED):
                    self.homes[name] = part.ipu
                    self.changed.add(name)
            for name, made in zip(part.outputs, graph_outputs(part.graph), strict=True):
                self.sources[name] = (part.ipu, source_line(made), TensorType.of(made.meta["val"]))
        types = {name: type_ for name, (_, _, type_) in self.sources.items()}
        streams = {ACCUMULATION_WEIGHT: TensorType(torch.float32, ())}
        for name, role in self.roles.items():
            if role.kind in ("input", "random_key"):
                streams[name] = self.variable_type(name)
        parts = self.partitioned.parts
        self.variables = self.find_variables()
        self.away = {v.name: v for v in self.variables if v.off_chip}
        self.moves = store_activations(parts, types | streams, streams, self.rule())

    def rule(self) -> ActivationRule:
        """Which activations leave the chip."""
        return ActivationRule(self.options.strategy.liveness, self.options.locations.activations)

    def variable_type(self, name: str) -> TensorType:
        return TensorType.of(self.values[name])

    def call_parts(self) -> None:
        for index, part in enumerate(self.partitioned.parts):
            for move in self.moves.loads.get(index, ()):
                self.load(move)
            arguments = tuple(self.argument(name, part.ipu) for name in part.inputs)
            self.micro_batch.append(self.call(part, arguments))
            self.copy_results(part)
            self.send_results(part)
            for move in self.moves.stores.get(index, ()):
                self.store(move)

    def store(self, move: Move) -> None:
        name = self.local.get((move.value, move.home), move.value)
        type_, source = self.moving(move)
        store = Store(name, f"{name}.off", type_, move.ipu, move.phase, source)
        self.stored[move.value, move.home] = store
        self.micro_batch.append(store)

    def load(self, move: Move) -> None:
        """Load a value; from here on this is what its IPU calls it."""
        stored = self.stored[move.value, move.home]
        name = stored.value if move.ipu == move.home else on_ipu(stored.value, move.ipu)
        result = f"{name}.phase{move.until}"
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
        if role is None or role.kind in ("input", "random_key"):
            result = name if not any(n == name for n, _ in self.local) else on_ipu(name, ipu)
            self.micro_batch.append(Receive(name, result, ipu))
        elif self.homes[name] == ipu or name in self.away:
            return name
        else:
            result = on_ipu(name, ipu)
            once = name not in self.changed
            (self.before if once else self.micro_batch).append(
                Copy(name, result, self.variable_type(name), self.homes[name], ipu, "the weights")
            )
            if not once:
                return result
        self.local[name, ipu] = result
        return result

    def call(self, part: Part, arguments: tuple[str, ...]) -> Call:
        prefix = "step" if part.direction == "forward_backward" else part.direction
        function = make_function(f"{prefix}{part.stage}", part.graph)
        function = self.functions.setdefault(function.key, function)
        traced = [node for node in function.operators if node.meta.get("stack_trace")]
        operators = [node for node in traced if not node.meta.get(BACKWARD)] or traced
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

    def copy_results(self, part: Part) -> None:
        """Copy a part's results to the other IPUs that read them later."""
        later = self.partitioned.parts[self.partitioned.parts.index(part) + 1 :]
        for name in part.outputs:
            _, source, type_ = self.sources[name]
            readers = [p for p in later if name in p.inputs]
            near = [p for p in readers if not self.rule().moves(type_, part, p)]
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
                self.micro_batch.append(Send(stream, name, part.ipu, self.sources[name][1]))

    def update(self) -> list[Instruction]:
        """What follows the micro-batches of a step: copies home, reductions, updates."""
        options = self.options
        result: list[Instruction] = []
        local: dict[str, str] = {}
        for part in self.partitioned.parts:
            for name in part.gradients:
                local[name], home = accumulator(name), self.homes[name]
                if part.ipu != home:
                    local[name] = on_ipu(accumulator(name), home)
                    type_, why = self.variable_type(name), f"gradient of {name}"
                    copy = Copy(accumulator(name), local[name], type_, part.ipu, home, why)
                    result.append(copy)
        for index, group in enumerate(self.groups):
            for ipu in sorted(set(self.capture.ipus.values())):
                names = tuple(n for n in group.parameters if n in local and self.homes[n] == ipu)
                if not names:
                    continue
                gradients = tuple(local[n] for n in names)
                result += self.reductions(names, gradients, ipu)
                clear = options.gradient_accumulation > 1
                divisor = _divisor(options)
                states = tuple(
                    (spec.name, tuple(_state(index, ipu, name, spec) for name in names))
                    for spec in group.rule.state_names()
                )
                update = Update(group.rule, index, ipu, names, gradients, states, divisor, clear)
                halves = any(self.variable_type(n).dtype == torch.float16 for n in names)
                if options.stochastic_rounding and halves:
                    update = replace(update, rounding="stochastic")
                result.append(update)
        return result

    def reductions(
        self, parameters: Sequence[str], gradients: Sequence[str], ipu: int
    ) -> list[Instruction]:
        """The sums over the replicas that share a parameter, if several do."""
        sharing: dict[ReplicaGroups | None, list[str]] = {}
        for name, gradient in zip(parameters, gradients, strict=True):
            sharing.setdefault(self.options.replica_groups.get(name), []).append(gradient)
        return [
            Reduce(tuple(values), ipu, groups=groups)
            for groups, values in sharing.items()
            if (self.options.replicas if groups is None else groups.size) > 1
        ]

    def find_variables(self) -> list[Variable]:
        options = self.options
        found = []
        for role in self.capture.placeholders:
            if role.name in self.homes:
                kind: Kind = role.kind  # type: ignore[assignment]
                own = options.replicas > 1 and role.name in self.changed
                type_ = self.variable_type(role.name)
                groups = options.replica_groups.get(role.name)
                _refuse_shared_change(role.name, groups, self.changed)
                own = own and groups is None
                tensor = self.capture.tensors[role.name]
                values = digest(tensor.to(type_.dtype)) if kind == "constant" else ""
                home = self.homes[role.name]
                found.append(Variable(role.name, type_, kind, home, not own, values, groups=groups))
        for part in self.partitioned.parts:
            for name in part.gradients:
                type_ = self.variable_type(name)
                alone = options.replicas == 1
                found.append(Variable(accumulator(name), type_, "accumulator", part.ipu, alone))
        for index, group in enumerate(self.groups):
            found += self.states(index, group)
        return locate_variables(found, options.locations, frozenset(self.changed))

    def states(self, index: int, group: UpdateGroup) -> list[Variable]:
        found: dict[str, Variable] = {}
        trained = {name for part in self.partitioned.parts for name in part.gradients}
        for name in group.parameters:
            if name not in trained:
                continue
            ipu, type_ = self.homes[name], self.variable_type(name)
            for spec in group.rule.state_names():
                scalar = spec.shape == "scalar"
                groups = None if scalar else self.options.replica_groups.get(name)
                state = _state(index, ipu, name, spec)
                held = TensorType(spec.dtype or type_.dtype, () if scalar else type_.shape)
                found.setdefault(state, Variable(state, held, "state", ipu, groups=groups))
        return list(found.values())

    def inputs(self) -> list[Input]:
        received = {i.stream for i in self.micro_batch if isinstance(i, Receive)}
        sources = {"input": "host", "random_key": "random"}
        streams = [
            Input(role.name, self.variable_type(role.name), sources[role.kind])  # type: ignore[arg-type]
            for role in self.capture.placeholders
            if role.kind in sources
        ]
        if ACCUMULATION_WEIGHT in received:
            streams.append(
                Input(ACCUMULATION_WEIGHT, TensorType(torch.float32, ()), "accumulation")
            )
        return streams

    def outputs(self) -> list[Output]:
        mode: Returns = self.options.returns(self.capture.training)  # type: ignore[assignment]
        varying = _varying(self.capture, self.options.replica_groups)
        nodes = [
            (node, role)
            for node, role in zip(self.capture.returned, self.capture.outputs, strict=True)
            if node is not None
        ]
        found = []
        for node, role in nodes:
            type_ = TensorType.of(node.meta["val"])
            if role.kind == "value":
                returns = mode if node in varying else "once"
                found.append(Output(role.name, type_, returns, self.options.return_period))
            elif role.name in self.partitioned.changed:
                found.append(Output(role.name, type_, "all", mutates=True))
        return found


def emit(
    capture: Capture, partitioned: Partitioned, options: Options, groups: Sequence[UpdateGroup] = ()
) -> Program:
    """The pass. `groups` are the optimiser's, empty for inference."""
    emitter = _Emitter(capture, partitioned, options, groups)
    order = _order(capture, options)
    if order != "in_turn":
        refuse_stale_reads(partitioned)
    emitter.call_parts()
    away = emitter.away
    micro_batches = tuple(move_in_micro_batch(emitter.micro_batch, away))
    if capture.training:
        accumulate = Repeat("micro_batch", options.gradient_accumulation, micro_batches, order)
        before = (*move_before_step(away), *emitter.before)
        step = (*before, accumulate, *move_after_step(emitter.update(), away))
        body: tuple[Instruction, ...] = (
            Repeat("device_iteration", options.device_iterations, step),
        )
    else:
        loop = Repeat("micro_batch", options.device_iterations, micro_batches, order)
        body = (*emitter.before, loop)
    return Program(
        kind=capture.alone or ("training" if capture.training else "inference"),
        num_ipus=max(capture.ipus.values()) + 1,
        replicas=options.replicas,
        variables=tuple(emitter.variables),
        inputs=tuple(emitter.inputs()),
        outputs=tuple(emitter.outputs()),
        functions=tuple(emitter.functions.values()),
        body=body,
    )


def _order(capture: Capture, options: Options) -> Order:
    """How micro-batches follow each other; a lone forward or backward pass has only one."""
    several = len(set(capture.ipus.values())) > 1 and not capture.alone
    return "pipelined" if several and options.strategy.kind == "pipelined" else "in_turn"


def _refuse_shared_change(
    name: str, groups: ReplicaGroups | None, changed: Collection[str]
) -> None:
    if groups is not None and groups.size > 1 and name in changed:
        raise CompileError(
            f"forward changes {name}, which every {groups} shares: each would have its own",
            hint="make groups of 1 replica",
        )


def _state(group: int, ipu: int, parameter: str, spec: StateSpec) -> str:
    """The variable that holds a state; parameters that step together share a scalar one."""
    owner = f"group{group}.ipu{ipu}" if spec.shape == "scalar" else parameter
    return f"{owner}.{spec.name}"


def _divisor(options: Options) -> float:
    """What the summed gradients are divided by before the update; an int without a loss scale."""
    parts = {
        "post": options.gradient_accumulation * options.replicas,
        "running": options.replicas,
        "post_and_loss": options.gradient_accumulation,
    }
    count = parts[options.mean_strategy] if options.reduction == "mean" else 1
    return count if options.loss_scale == 1.0 else count * options.loss_scale


def _varying(capture: Capture, grouped: Collection[str]) -> set[fx.Node]:
    """Nodes that depend on an input, a floating-point parameter or buffer, a variable that the
    model changes or groups of replicas have for themselves, or a random number."""
    changed = {role.name for role in capture.outputs if role.kind == "mutation"}
    roles = capture.roles().items()
    varying = {
        node
        for node, role in roles
        if role.name in changed or role.name in grouped or _varies(role, node)
    }
    for node in capture.graph.graph.nodes:
        if node.target in _FROM_SHAPE:
            continue
        if draws(node) or varying.intersection(node.all_input_nodes):
            varying.add(node)
    return varying


def _varies(role: Placeholder, node: fx.Node) -> bool:
    if role.kind == "constant":
        return False
    return role.kind in ("input", "random_key") or bool(node.meta["val"].is_floating_point())
