"""Refuse a program that cannot run as it reads.

The body of a training program is one loop over device iterations, of what comes before the
micro-batches, one loop over these, and the end of the step. That of any other program is what comes
before, and the loop over micro-batches. Every name stands for one thing, which is made before it is
read, on the IPU that reads it, in the type that is expected. Functions write nothing that they are
given, and what is kept or written of their results lies in memory of its own: what lasts is written
by instructions.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, assert_never

from ipu_dynamo.errors import ProgramError
from ipu_dynamo.program.ir.clipping import ClipFactor, ClipValues, GradientNorm
from ipu_dynamo.program.ir.coupled_update import JointUpdate, UpdatePart
from ipu_dynamo.program.ir.instructions import (
    AdjustLossScale,
    AllGather,
    AllReduce,
    Call,
    Copy,
    Load,
    Plain,
    Receive,
    ReduceScatter,
    Send,
    Store,
    Update,
)
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_factors import UpdateFactors
from ipu_dynamo.program.ir.values import Variable
from ipu_dynamo.program.ir.verify.clipping import ClipChecks
from ipu_dynamo.program.ir.verify.coupled import check_factors, check_joint, check_part
from ipu_dynamo.program.ir.verify.memory import MemoryChecks
from ipu_dynamo.program.ir.verify.residence import Residence
from ipu_dynamo.program.ir.verify.shape import check_loops, check_tables, sharing
from ipu_dynamo.program.ir.verify.update import check_update
from ipu_dynamo.program.ir.verify.writes import WriteChecks
from ipu_dynamo.program.ir.writes import Accumulate, WriteBuffer
from ipu_dynamo.program.schedule.sections import sections

if TYPE_CHECKING:
    from ipu_dynamo.program.ir.program import Program


def verify(program: "Program") -> None:
    """Check a whole program.

    Raises:
        ProgramError: what is wrong, and in which instruction.
    """
    try:
        check_tables(program)
        check_loops(program)
    except ProgramError:
        raise
    except ValueError as error:
        raise ProgramError(str(error)) from error
    _Verifier(program).run()


class _Verifier:
    """Walks through a program once; each method checks one kind of instruction."""

    def __init__(self, program: "Program") -> None:
        self.program = program
        self.functions = {function.name: function for function in program.functions}
        self.update_functions = {f.name: f for f in program.update_functions}
        self.inputs = {stream.name: stream for stream in program.inputs}
        self.outputs = {stream.name: stream for stream in program.outputs}
        self.has = Residence({variable.name: variable for variable in program.variables})
        self.writes = WriteChecks(self.has)
        self.clips = ClipChecks(self.has)
        self.memory = MemoryChecks(self.functions)
        self.sent: set[str] = set()
        self.updated: set[str] = set()

    def run(self) -> None:
        cut = sections(self.program)
        self.check_all(cut.before)
        before = set(self.has.values)
        self.check_all(cut.loop)
        if missing := self.outputs.keys() - self.sent:
            raise ProgramError(f"nothing is sent to the output {min(missing)}")
        self.has.forget(set(self.has.values) - before)
        self.check_all(cut.after)
        if self.has.fetched:
            name, ipu = min(self.has.fetched)
            raise ProgramError(f"%{name} is loaded to ipu{ipu}, and not stored again")
        if self.has.stale:
            raise ProgramError(f"%{min(self.has.stale)} was updated in shards, and is not gathered")

    def check_all(self, instructions: Iterable[Plain]) -> None:
        for instruction in instructions:
            try:
                self.check(instruction)
                self.writes.follow(instruction)
                self.memory.follow(instruction)
            except ProgramError:
                raise
            except ValueError as error:
                raise ProgramError(str(error), instruction) from error

    def check(self, instruction: Plain) -> None:
        match instruction:
            case Receive():
                self.receive(instruction)
            case Send():
                self.send(instruction)
            case Copy():
                self.copy(instruction)
            case Call():
                self.call(instruction)
            case Accumulate() | WriteBuffer():
                pass  # `writes` and `memory` do
            case Store():
                self.store(instruction)
            case Load():
                self.load(instruction)
            case AllGather():
                self.gather(instruction)
            case ReduceScatter(types=types, shards=shards):
                actual = self.summed(instruction)
                _number("types", len(types), len(instruction.values))
                for name, type_, expected in zip(instruction.values, actual, types, strict=True):
                    _same(name, type_, expected)
                _number("shards", shards, sharing(instruction.groups, self.program.replicas))
            case AllReduce():
                self.summed(instruction)
            case GradientNorm() | ClipFactor() | ClipValues():
                self.clips.check(instruction)
            case UpdateFactors():
                check_factors(instruction, self.has, self.update_functions)
            case UpdatePart():
                check_part(instruction, self.has, self.update_functions)
            case JointUpdate():
                check_joint(instruction, self.has, self.update_functions)
            case Update():
                check_update(instruction, self.has, self.updated, self.update_functions)
            case AdjustLossScale():
                self.adjust(instruction)
            case _:
                assert_never(instruction)

    def receive(self, receive: Receive) -> None:
        stream = self.inputs.get(receive.stream)
        if stream is None:
            raise ValueError(f"no input is called {receive.stream}")
        self.on(receive.ipu)
        self.has.define(receive.result, receive.ipu, stream.type, receive)

    def send(self, send: Send) -> None:
        stream = self.outputs.get(send.stream)
        if stream is None:
            raise ValueError(f"no output is called {send.stream}")
        if send.stream in self.sent:
            raise ValueError(f"the output {send.stream} is sent twice")
        self.sent.add(send.stream)
        _same(send.value, self.has.at(send.value, send.ipu), stream.type)

    def copy(self, copy: Copy) -> None:
        self.on(copy.dst)
        if copy.src == copy.dst:
            raise ValueError(f"it is on ipu{copy.src} already")
        _same(copy.value, self.has.at(copy.value, copy.src), copy.type)
        self.has.define(copy.result, copy.dst, copy.type, copy)

    def call(self, call: Call) -> None:
        function = self.functions.get(call.function)
        if function is None:
            raise ValueError(f"no function is called {call.function}")
        self.on(call.ipu)
        _number("arguments", len(call.arguments), len(function.inputs))
        _number("results", len(call.results), len(function.outputs))
        for name, expected in zip(call.arguments, function.inputs, strict=True):
            _same(name, self.has.at(name, call.ipu), expected)
        for result, type_ in zip(call.results, function.outputs, strict=True):
            if (result is None) != (type_ is None):
                raise ValueError(f"%{result} is called what @{call.function} returns as {type_}")
            if result is not None and type_ is not None:
                self.has.define(result, call.ipu, type_, call)
        read = {(n, call.ipu) for n in call.arguments if self.is_parameter(n)}
        self.has.fetched -= read
        self.has.whole -= read

    def is_parameter(self, name: str) -> bool:
        variable = self.has.variables.get(name)
        return variable is not None and variable.kind == "parameter"

    def store(self, store: Store) -> None:
        place = store.value, store.ipu
        if store.value == store.result:
            variable = self.moved(store)
            self.has.at(store.value, store.ipu, shard=True)
            if store.ipu != variable.ipu:
                raise ValueError(f"%{store.value} lives on ipu{variable.ipu}")
            self.has.fetched.discard(place)
            return
        _same(store.value, self.has.at(*place), store.type)
        if place not in self.has.values:
            raise ValueError(f"%{store.value} is a variable, which keeps its name")
        if store.result in self.has.stored or store.result in self.has.variables:
            raise ValueError(f"%{store.result} is in streaming memory already")
        del self.has.values[place]
        self.has.stored[store.result] = store.type

    def load(self, load: Load) -> None:
        self.on(load.ipu)
        if load.value == load.result:
            self.moved(load)
            self.has.fetched.add((load.value, load.ipu))
            return
        if load.value not in self.has.stored:
            raise ValueError(f"%{load.value} is not in streaming memory here")
        _same(load.value, self.has.stored[load.value], load.type)
        self.has.define(load.result, load.ipu, load.type, load)

    def moved(self, move: Load | Store) -> Variable:
        """The variable that is loaded or stored, as one of those that are off the chip."""
        variable = self.has.variable(move.value)
        if not variable.off_chip:
            raise ValueError(f"%{move.value} stays on ipu{variable.ipu}")
        if move.shard != (variable.shards > 1):
            raise ValueError(f"%{move.value} is in {variable.shards} shards")
        _same(move.value, variable.held, move.type)
        return variable

    def gather(self, gather: AllGather) -> None:
        variable = self.has.variable(gather.value)
        _same(gather.value, self.has.at(gather.value, gather.ipu, shard=True), gather.type)
        if variable.groups != gather.groups:
            raise ValueError(f"%{gather.value} is for each {variable.groups or 'replica'}")
        _number("shards", gather.shards, sharing(gather.groups, self.program.replicas))
        if variable.shards == 1 and gather.value not in self.has.stale:
            raise ValueError(f"each replica has the whole of %{gather.value}")
        self.has.stale.discard(gather.value)
        self.has.whole.add((gather.value, gather.ipu))

    def summed(self, total: ReduceScatter | AllReduce) -> list[TensorType]:
        """What is summed over replicas."""
        sharing(total.groups, self.program.replicas)
        if len(set(total.values)) < len(total.values):
            raise ValueError("a value is summed twice")
        return [self.has.at(name, total.ipu, shard=True) for name in total.values]

    def adjust(self, adjust: AdjustLossScale) -> None:
        for name in (adjust.scale, *filter(None, (adjust.steps, adjust.so_far))):
            if self.has.variable(name).kind != "loss_scale":
                raise ValueError(f"%{name} is no loss scale")
            self.has.at(name, adjust.ipu)
        for name in adjust.within:
            self.has.at(name, adjust.ipu)

    def on(self, ipu: int) -> None:
        if not 0 <= ipu < self.program.num_ipus:
            raise ValueError(f"there is no ipu{ipu}, of {self.program.num_ipus}")


def _same(name: str, actual: TensorType, expected: TensorType) -> None:
    if actual != expected:
        raise ValueError(f"%{name} is {actual}, and {expected} is expected")


def _number(what: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise ValueError(f"{actual} {what} stand where {expected} are expected")
