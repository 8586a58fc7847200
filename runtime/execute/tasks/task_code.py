"""Write a program's loop over micro-batches as Python functions on a list of registers.

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
Functions of closures, which look up their work while they run, cost more than small calls do.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from ipu_dynamo.program import (
    AllGather,
    Call,
    Collective,
    Copy,
    Load,
    Plain,
    Program,
    Receive,
    ReceiveFromRank,
    Send,
    SendToRank,
    Store,
)
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.program.schedule.registers import differ, fetched_as
from ipu_dynamo.runtime.engines.check.checked_stage import CheckedStage
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.execute.memory.streaming_memory import StreamingMemory
from ipu_dynamo.runtime.execute.tasks.replica_exchange import ReplicaExchange

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
    """Registers, callables and devices of the instructions of a program.

    Args:
        registers: by name.
        kept: registers that outlive a micro-batch.
        stages: of every function, its recipe and its callable.
        failed: the error for that of a call, given the call's number, its arguments, unless these
            are gone, and the micro-batch.
        received: for every value that is received, its place in `received`; the others are in
            their registers from the beginning.
        sent: for every stream that is sent, its place in `sent`, and whether its `kept` says which
            device iterations and accumulation steps the call needs; else it needs all. Values of
            streams that are not sent stay in their registers.
        devices: of the IPUs; none: they share one.
        replicas: how many run here.
        exchanges: of each collective, by its result.
        posts, takes: of each stream to and from another rank, by its wire; see `RankStreams`.
    """

    program: Program
    registers: Mapping[str, int]
    kept: Set[int]
    stages: Mapping[str, tuple[FunctionRecipe, Stage]]
    failed: Failed
    received: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    devices: Sequence[torch.device] = ()
    replicas: int = 1
    memory: StreamingMemory = field(default_factory=StreamingMemory)
    exchanges: Mapping[str, ReplicaExchange] = field(default_factory=dict)
    posts: Mapping[int, Callable[[int, torch.Tensor], None]] = field(default_factory=dict)
    takes: Mapping[int, Callable[[int], torch.Tensor]] = field(default_factory=dict)

    def bound(self, instructions: Sequence[Plain]) -> list[Bound]:
        """Bind instructions to their registers; a call reads the values fetched for it."""
        owners = {variable.name: variable.ipu for variable in self.program.variables}
        fetched: dict[int, int] = {}
        bound = []
        for instruction in instructions:
            if instruction.writes:
                raise ValueError(_NOT_JOINED)
            arguments: tuple[int, ...] = ()
            read = tuple(self.registers[name] for name in instruction.read_names)
            if name := instruction.fetches:
                (ipu,), (move,) = instruction.ipus, instruction.moves
                target = self.registers[fetched_as(name, ipu, owners, self.devices)]
                names = (*read, target) if move.reads else (target,)
                fetched[self.registers[name]] = target
            else:
                if isinstance(instruction, Call):
                    read = arguments = tuple(fetched.get(register, register) for register in read)
                    fetched = {}
                names = (*read, *(self.registers[name] for name in instruction.made_names))
            bound.append(Bound(instruction, names, arguments))
        return bound


class TaskWriter:
    """Writes functions, each for instructions that run one after the other.

    Args:
        passes: all instructions of a micro-batch, by function.
        timed: each instruction runs in a block `with timed(instruction)`.

    Attributes:
        names: the global names of the functions.
        lines: of each function.
        texts: a description of each function: a line for each instruction, such as
            `r13, r14 = call! step1(r1, r11, !r3); free r11`; `!` is before a written argument.
    """

    def __init__(
        self, binding: Binding, passes: Sequence[Sequence[Plain]], *, timed: bool = False
    ) -> None:
        self._binding = binding
        bound = binding.bound([instruction for of in passes for instruction in of])
        last = {register: place for place, one in enumerate(bound) for register in one.registers}
        ends: list[list[int]] = [[] for _ in bound]
        for register, place in sorted(last.items()):
            if register not in binding.kept:
                ends[place].append(register)
        self._calls = 0
        self.names: dict[str, Any] = {"memory": binding.memory, "failed": binding.failed}
        self.names |= {f"device{ipu}": device for ipu, device in enumerate(binding.devices)}
        each = iter(zip(bound, ends, strict=True))
        written = [[self._written(*next(each)) for _ in of] for of in passes]
        self.lines = [[line for lines, _ in of for line in lines] for of in written]
        self.texts = [[text for _, text in of] for of in written]
        if timed:
            self.lines = self._timed(passes, written)
        self._give(passes, bound, ends)

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

    def _timed(
        self,
        passes: Sequence[Sequence[Plain]],
        written: Sequence[Sequence[tuple[list[str], str]]],
    ) -> list[list[str]]:
        """The lines of each function, those of each instruction in a block."""
        self.names |= {
            f"instruction{number}_{place}": instruction
            for number, of in enumerate(passes)
            for place, instruction in enumerate(of)
        }
        return [
            [
                line
                for place, (lines, _) in enumerate(of)
                for line in (
                    f"with timed(instruction{number}_{place}):",
                    *(f"    {line}" for line in lines or ["pass"]),
                )
            ]
            for number, of in enumerate(written)
        ]

    def _give(
        self,
        passes: Sequence[Sequence[Plain]],
        bound: Sequence[Bound],
        ends: Sequence[Sequence[int]],
    ) -> None:
        """Let the pass that makes a value give it to the other replicas, in the end."""
        makers = {name: i for i, of in enumerate(passes) for one in of for name in one.made_names}
        for one, dead in zip(bound, ends, strict=True):
            if isinstance(one.instruction, Collective):
                source = one.registers[0]
                # a later call may overwrite a register that is read again
                given = f"r[{source}]" if source in dead else f"r[{source}].clone()"
                exchange, value = self._exchange(one.instruction.result), one.instruction.value
                self.lines[makers[value]].append(f"{exchange}.give(k, {given})")

    def _exchange(self, name: str) -> str:
        """Return the name of a collective's exchange in the code."""
        place = list(self._binding.exchanges).index(name)
        self.names[f"exchange{place}"] = self._binding.exchanges[name]
        return f"exchange{place}"

    def _written(self, bound: Bound, dead: Sequence[int]) -> tuple[list[str], str]:
        """Return the lines of an instruction, and its description.

        Args:
            dead: the registers that nothing reads afterwards.
        """
        instruction = bound.instruction
        released: list[int] = []
        source, target = (*bound.registers[:1], *bound.registers[-1:]) or (0, 0)  # but of calls
        match instruction:
            case Call(function=name):
                recipe = self._binding.stages[name][0]
                if recipe.releases:
                    released = sorted({*bound.arguments} & {*dead})
                lines = self._call(instruction, bound.arguments, released)
                text = self._call_text(instruction, recipe, bound.arguments)
            case Receive(stream=stream, result=name):
                lines = self._receive(name, target)
                text = f"r{target} = receive {stream}"
            case Send(stream=stream):
                lines = self._send(stream, source)
                text = f"send {stream} = r{source}"
            case Copy(src=src, dst=dst):
                lines = self._move(source, target, dst if self._differ(src, dst) else None)
                same = f"r{target} is the copy of ipu{src} on ipu{dst}"
                other = f"r{target} = r{source} of ipu{src} on ipu{dst}"
                text = same if source == target else other
            case Load() if instruction.fetches:
                lines = self._fetch(instruction, source, target)
                text = f"r{target} = fetch r{source}"
            case Load(ipu=ipu):
                device = f", device{ipu}" if self._binding.devices else ""
                lines = [f"r[{target}] = memory.load(r[{source}]{device})"]
                text = f"r{target} = load r{source}"
            case Store():
                lines = [f"r[{target}] = memory.store(r[{source}])"]
                text = f"r{target} = store r{source}"
            case Collective(kind=kind, result=name, members=members):
                taken = f"r[{target}] = {self._exchange(name)}.take(k)"
                lines = [taken, f"memory.exchange({instruction.nbytes})"]
                text = f"r{target} = {kind} r{source} of {members} replicas"
            case SendToRank(wire=wire):
                self.names[f"post{wire}"] = self._binding.posts[wire]
                lines = [f"post{wire}(k, r[{source}])"]
                text = f"send wire {wire} = r{source}"
            case ReceiveFromRank(wire=wire):
                self.names[f"take{wire}"] = self._binding.takes[wire]
                lines = [f"r[{target}] = take{wire}(k)"]
                text = f"r{target} = receive wire {wire}"
            case AllGather(value=name):
                lines = [f"memory.gather(r[{target}], {self._shards(name)})"]
                text = f"gather r{target}"
            case _:
                raise ValueError(f"no task does this: {instruction}")
        if dead:
            text += f"; free {' '.join(f'r{register}' for register in dead)}"
        return [*lines, *_forgotten(sorted({*dead} - {*released}))], text

    def _call_text(self, call: Call, recipe: FunctionRecipe, arguments: Sequence[int]) -> str:
        taken = (f"{'!' if i in recipe.written else ''}r{r}" for i, r in enumerate(arguments))
        returned = ", ".join(
            f"r{self._binding.registers[name]}" if name else "none" for name in call.results
        )
        word = "call!" if recipe.written else "call"
        text = f"{word} {recipe.function.name}({', '.join(taken)})"
        return f"{returned} = {text}" if returned else text

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
        replicas = self._binding.replicas
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
