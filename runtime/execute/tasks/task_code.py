"""Write what a program does for every micro-batch as Python functions on a list of registers.

    def pass1(r, k, received, sent):
        r[12] = received[1][k]
        try:
            r[13], r[14] = step1([r[1], r[11], r[12], r[3]])
        except Exception as error:
            raise failed(1, error, [r[1], r[11], r[12], r[3]], k) from error
        r[11] = r[12] = None
        sent[0][k] = r[13]
        r[13] = None

Each instruction is a line or two, in program order, and a value is forgotten after its last reader.
Functions of closures, which look up what to do while they run, cost more than small calls do.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, assert_never

import torch

from ipu_dynamo.program import (
    Accumulate,
    AdjustLossScale,
    AllGather,
    AllReduce,
    Call,
    ClipFactor,
    ClipValues,
    Copy,
    GradientNorm,
    JointUpdate,
    Load,
    Plain,
    Program,
    Receive,
    ReduceScatter,
    Send,
    Store,
    Update,
    UpdateFactors,
    UpdatePart,
    WriteBuffer,
)
from ipu_dynamo.program.recipe import Recipe
from ipu_dynamo.program.schedule.registers import differ, fetched_as
from ipu_dynamo.program.schedule.stage_passes import is_fetch
from ipu_dynamo.runtime.engines.check.checked_stage import CheckedStage
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.tasks.task_text import task_text

Failed = Callable[[int, Exception, Sequence[Any] | None, int], Exception]

_NOT_JOINED = "functions write what instructions say: run what InlineWrites makes"


@dataclass(frozen=True, slots=True)
class Bound:
    """An instruction and the registers that it reads and writes.

    Args:
        arguments: of a call, in its order.
    """

    instruction: Plain
    registers: tuple[int, ...]
    arguments: tuple[int, ...] = ()


@dataclass(frozen=True)
class Binding:
    """What the instructions of a program stand for.

    Args:
        registers: by name.
        kept: registers that outlive a micro-batch.
        stages: of every function, how it was made and what to call.
        failed: the error for that of a call, given the call's number, its arguments, unless these
            are gone, and the micro-batch.
        received: for every value that is received, its place in `received`; the others are in
            their registers from the beginning.
        sent: for every stream that is sent, its place in `sent`, and whether its `kept` says which
            device iterations and accumulation steps the call needs; else it needs all. Values of
            streams that are not sent stay in their registers.
        devices: of the IPUs; none: they share one.
    """

    program: Program
    registers: Mapping[str, int]
    kept: Set[int]
    stages: Mapping[str, tuple[Recipe, Stage]]
    failed: Failed
    received: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    devices: Sequence[torch.device] = ()
    memory: StreamingMemory = field(default_factory=StreamingMemory)

    def bound(self, instructions: Sequence[Plain]) -> list[Bound]:
        """What each instruction reads and writes; a call reads what was fetched for it."""
        owners = {variable.name: variable.ipu for variable in self.program.variables}
        fetched: dict[int, int] = {}
        bound = []
        for instruction in instructions:
            arguments: tuple[int, ...] = ()
            match instruction:
                case Call():
                    own = (self.registers[name] for name in instruction.arguments)
                    arguments = tuple(fetched.get(register, register) for register in own)
                    results = (self.registers[name] for name in instruction.results if name)
                    names: tuple[int, ...] = (*arguments, *results)
                    fetched = {}
                case Load() | AllGather() if is_fetch(instruction):
                    name = fetched_as(instruction.value, instruction.ipu, owners, self.devices)
                    source, target = self.registers[instruction.value], self.registers[name]
                    names = (target,) if isinstance(instruction, AllGather) else (source, target)
                    fetched[source] = target
                case Copy() | Load() | Store():
                    names = self.registers[instruction.value], self.registers[instruction.result]
                case Receive():
                    names = (self.registers[instruction.result],)
                case Send():
                    names = (self.registers[instruction.value],)
                case Accumulate() | WriteBuffer():
                    raise ValueError(_NOT_JOINED)
                case AllGather() | ReduceScatter() | AllReduce() | Update() | AdjustLossScale():
                    raise ValueError(f"this is not done for every micro-batch: {instruction}")
                case GradientNorm() | ClipFactor() | ClipValues() | UpdateFactors():
                    raise ValueError(f"this is not done for every micro-batch: {instruction}")
                case UpdatePart() | JointUpdate():
                    raise ValueError(f"this is not done for every micro-batch: {instruction}")
                case _:
                    assert_never(instruction)
            bound.append(Bound(instruction, names, arguments))
        return bound


class TaskWriter:
    """Writes functions, each for instructions that run one after the other.

    Args:
        passes: all instructions of a micro-batch, by function.

    Attributes:
        names: what the functions know by name.
        lines: of each function.
    """

    def __init__(self, binding: Binding, passes: Sequence[Sequence[Plain]]) -> None:
        self._binding = binding
        bound = binding.bound([instruction for of in passes for instruction in of])
        last = {register: one for one in bound for register in one.registers}
        ends: dict[int, list[int]] = {id(one): [] for one in bound}
        for register, one in last.items():
            if register not in binding.kept:
                ends[id(one)].append(register)
        self._calls = 0
        self.names: dict[str, Any] = {"memory": binding.memory, "failed": binding.failed}
        self.names |= {f"device{ipu}": device for ipu, device in enumerate(binding.devices)}
        position = iter(bound)
        self._passes = [[next(position) for _ in of] for of in passes]
        self._ends = ends
        self.lines = [
            [line for one in of for line in self._lines(one, ends)] for of in self._passes
        ]

    def texts(self) -> list[list[str]]:
        """What each function does, in words: a line for each instruction."""
        recipes = {name: recipe for name, (recipe, _) in self._binding.stages.items()}
        registers = self._binding.registers
        texts = []
        for of in self._passes:
            texts.append(list[str]())
            for bound in of:
                instruction, dead = bound.instruction, sorted(self._ends[id(bound)])
                read, results = bound.registers, list[int | None]()
                if isinstance(instruction, Call):
                    read = bound.arguments
                    results = [registers[n] if n else None for n in instruction.results]
                texts[-1].append(task_text(instruction, read, results, dead, recipes))
        return texts

    def function(self, name: str, arguments: str, lines: Sequence[str]) -> Callable[..., Any]:
        """The function of some lines."""
        body = "\n".join(f"    {line}" for line in lines) or "    pass"
        names = dict(self.names)
        source = f"def {name}({arguments}):\n{body}\n"
        exec(compile(source, f"<{__file__}: {name}>", "exec"), names)
        for stage, called in self.names.items():
            if isinstance(called, CheckedStage):  # until its check is over
                called.held_in(names, stage)
        function: Callable[..., Any] = names[name]
        return function

    def _lines(self, bound: Bound, ends: Mapping[int, list[int]]) -> list[str]:
        instruction, dead = bound.instruction, ends[id(bound)]
        released: list[int] = []
        match instruction:
            case Call():
                if self._binding.stages[instruction.function][0].releases:
                    released = sorted({*bound.arguments} & {*dead})
                lines = self._call(instruction, bound.arguments, released)
            case Receive(result=name):
                lines = self._receive(name, bound.registers[0])
            case Send(stream=stream):
                lines = self._send(stream, bound.registers[0])
            case Copy(src=src, dst=dst):
                source, target = bound.registers
                lines = self._move(source, target, dst if self._differ(src, dst) else None)
            case Load() if is_fetch(instruction):
                source, target = bound.registers
                lines = self._fetch(instruction, source, target)
            case Load(ipu=ipu):
                source, target = bound.registers
                device = f", device{ipu}" if self._binding.devices else ""
                lines = [f"r[{target}] = memory.load(r[{source}]{device})"]
            case Store():
                source, target = bound.registers
                lines = [f"r[{target}] = memory.store(r[{source}])"]
            case AllGather(value=name):
                lines = [f"memory.gather(r[{bound.registers[0]}], {self._shards(name)})"]
            case Accumulate() | WriteBuffer():
                raise ValueError(_NOT_JOINED)
            case ReduceScatter() | AllReduce() | Update() | AdjustLossScale():
                raise ValueError(f"this is not done for every micro-batch: {instruction}")
            case GradientNorm() | ClipFactor() | ClipValues() | UpdateFactors():
                raise ValueError(f"this is not done for every micro-batch: {instruction}")
            case UpdatePart() | JointUpdate():
                raise ValueError(f"this is not done for every micro-batch: {instruction}")
            case _:
                assert_never(instruction)
        return [*lines, *_forgotten(sorted({*dead} - {*released}))]

    def _call(self, call: Call, arguments: Sequence[int], released: Sequence[int]) -> list[str]:
        number, self._calls = self._calls, self._calls + 1
        stage = f"stage_{call.function}" if call.function.isidentifier() else f"stage{number}"
        self.names[stage] = self._binding.stages[call.function][1]
        results = [f"r[{self._binding.registers[n]}]" if n else "_" for n in call.results]
        made = f"{', '.join(results)}, = " if any(call.results) else ""
        given = listed = _listed(arguments)
        lines = []
        if released:
            lines = [f"arguments = {listed}", *_forgotten(released)]
            given, listed = "arguments", "None"
        return [
            *lines,
            "try:",
            f"    {made}{stage}({given})",
            "except Exception as error:",
            f"    raise failed({number}, error, {listed}, k) from error",
        ]

    def _receive(self, name: str, register: int) -> list[str]:
        place = self._binding.received.get(name)
        return [] if place is None else [f"r[{register}] = received[{place}][k]"]

    def _send(self, stream: str, register: int) -> list[str]:
        if stream not in self._binding.sent:
            return []
        program, (place, drops) = self._binding.program, self._binding.sent[stream]
        if any(o.printing for o in program.outputs if o.name == stream):
            return [f"sent[{place}](k, r[{register}])"]
        line = f"sent[{place}][k] = r[{register}]"
        if not drops:
            return [line]
        replicas = program.replicas
        step = "k" if replicas == 1 else f"k // {replicas}"
        return [f"if sent[{place}].kept[{step}]:", f"    {line}"]

    def _fetch(self, load: Load, source: int, target: int) -> list[str]:
        owners = {variable.name: variable.ipu for variable in self._binding.program.variables}
        away = self._differ(load.ipu, owners[load.value])
        line = f"memory.fetch(r[{source}], {self._shards(load.value)})"
        return [line, *self._move(source, target, load.ipu if away else None)]

    def _move(self, source: int, target: int, ipu: int | None) -> list[str]:
        if ipu is not None:
            return [f"r[{target}] = r[{source}].to(device{ipu})"]
        return [] if source == target else [f"r[{target}] = r[{source}]"]

    def _differ(self, ipu: int, other: int) -> bool:
        return differ(ipu, other, self._binding.devices)

    def _shards(self, name: str) -> int:
        return next(v.shards for v in self._binding.program.variables if v.name == name)


def _listed(registers: Sequence[int]) -> str:
    """A list of registers, those that follow one another as a slice."""
    parts = []
    for _, run in groupby(enumerate(registers), lambda pair: pair[1] - pair[0]):
        numbers = [register for _, register in run]
        if len(numbers) > 2:
            parts.append(f"*r[{numbers[0]}:{numbers[-1] + 1}]")
        else:
            parts += [f"r[{register}]" for register in numbers]
    return f"[{', '.join(parts)}]"


def _forgotten(registers: Sequence[int]) -> list[str]:
    targets = " = ".join(f"r[{register}]" for register in registers)
    return [f"{targets} = None"] if registers else []
