"""Follow a program's instructions, to find which tensors each IPU holds at each step.

    for ipu in liveness(program):
        peak = max(range(len(ipu.steps)), key=ipu.nbytes.__getitem__)
        print(ipu.at(peak))

- A step is an operator, also within a call, or an instruction, or the update of a parameter.
- A tensor dies after its last reader, also in a later call. An accumulation and a transfer to the
  host take place as soon as their value is there. So outlining changes no byte.
- A host stream has a buffer of a micro-batch, in which its tensor is received. With an overlap it
  has one more on the IO tiles; across device iterations two more.
- A variable that a stage pass loads or gathers is there until the pass ends; one that is loaded for
  an update, while its parameter is updated.
- An operator may give its result the memory of its first operand, if that dies there and has as
  many bytes.
"""

from collections.abc import Callable, Iterable, Sequence

from ipu_dynamo.program.ir.base_instruction import How, Moved
from ipu_dynamo.program.ir.instructions import (
    AllGather,
    Call,
    Copy,
    Load,
    Plain,
    Receive,
    Send,
    Store,
)
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_instructions import Update, UpdatePart
from ipu_dynamo.program.ir.values import Variable
from ipu_dynamo.program.ir.writes import Accumulate
from ipu_dynamo.program.liveness.function_memory import FunctionMemory, MemoryPiece
from ipu_dynamo.program.liveness.live_tensors import IpuLiveness, LiveStep, Role
from ipu_dynamo.program.liveness.tensor_spans import Held, HeldTensor, InPlace, IpuSteps
from ipu_dynamo.program.machine_operators import MachineGraph, Seen, machine_calls
from ipu_dynamo.program.schedule.step_order import PlacedStep, StepOrder

_BEFORE, _AFTER = -1, -2  # in place of the number of a micro-batch
ROLE_OF: dict[str, Role] = {
    "parameter": "weight",
    "buffer": "weight",
    "constant": "constant",
    "whole": "stream",
    "accumulator": "accumulator",
    "state": "state",
    "loss_scale": "state",
}
_ON_IO_TILES = {"no_overlap": 0, "accumulation_loop": 1, "device_iteration_loop": 2}


def liveness(
    program: Program,
    *,
    size: Callable[[TensorType], int] = lambda type_: type_.nbytes,
    in_place: InPlace = lambda operator: False,
) -> tuple[IpuLiveness, ...]:
    """Find the tensors of each IPU of a replica.

    Args:
        size: bytes of a tensor.
        in_place: whether an operator may give its result the memory of its first operand.
    """
    follower = _Follower(program, size)
    follower.follow()
    return tuple(ipu.finished(number, in_place) for number, ipu in enumerate(follower.ipus))


class _Follower:
    """The IPUs of a program, while its instructions are followed.

    `names` has the memory of each name, by IPU and micro-batch; `starts` the first step of each
    instruction, by number, micro-batch and IPU; `ends` the last step of a stage pass. `fetched` has
    the copies of variables that passes have fetched, by name, IPU, micro-batch and pass.
    """

    def __init__(self, program: Program, size: Callable[[TensorType], int]) -> None:
        self.program, self.size = program, size
        self.order = StepOrder.of(program)
        self.variables = {variable.name: variable for variable in program.variables}
        self.inputs = {stream.name: stream for stream in program.inputs}
        self.types: dict[str, Seen] = {}
        self.calls = _functions_of_calls(program, self.types)
        self.updates: dict[str, FunctionMemory] = {}
        self.ipus = [
            IpuSteps(self.order.left.get(ipu, 0), self.order.kept)
            for ipu in range(program.num_ipus)
        ]
        self.names: dict[tuple[str, int, int], Held] = {}
        self.starts: dict[tuple[int, int, int], int] = {}
        self.ends: dict[tuple[int, int, int], int] = {}
        self.fetched: dict[tuple[str, int, int, int], tuple[How, HeldTensor]] = {}

    def follow(self) -> None:
        before = [_outside(number, i, _BEFORE) for number, i in self.order.before]
        after = [_outside(number, i, _AFTER) for number, i in self.order.after]
        self._number(before)
        starts = [len(ipu.steps) for ipu in self.ipus]
        self._number(sorted(self.order.period, key=lambda placed: placed.turn))
        for ipu, start in zip(self.ipus, starts, strict=True):
            ipu.loop = start, len(ipu.steps)
        self._number(after)
        self._hold_variables()
        period = sorted(self.order.period, key=lambda placed: (placed.micro_batch, placed.number))
        for placed in (*before, *period, *after):
            self._do(placed)

    # The steps of instructions, in the order of each IPU.

    def _number(self, instructions: Iterable[PlacedStep]) -> None:
        for placed in instructions:
            count = self._count(placed)
            for ipu in _ipus(placed.instruction):
                here = self.ipus[ipu]
                self.starts[placed.number, placed.micro_batch, ipu] = len(here.steps)
                here.steps += [None] * count
                if isinstance(placed.instruction, Call):
                    end = len(here.steps) - 1
                    self.ends[placed.stage_pass, placed.micro_batch, ipu] = end
                    if not placed.weights:
                        here.ends[placed.slot] = end

    def _count(self, placed: PlacedStep) -> int:
        """How many steps an instruction has on each of its IPUs."""
        match placed.instruction:
            case Call():
                return len(self.calls[placed.number].steps)
            case Update() as update:
                return len(update.parameters) * self._steps_of(update)
            case UpdatePart() as part:
                return self._steps_of(part)
            case Accumulate() | Receive() | Send():
                return 0
            case instruction:
                return 0 if self._is_around_update(placed) else min(len(instruction.ipus), 1)

    def _steps_of(self, update: Update | UpdatePart) -> int:
        """How many steps it takes to update a parameter."""
        memory = self._function_of(update)
        return 1 if memory is None else max(len(memory.steps), 1)

    def _function_of(self, update: Update | UpdatePart) -> FunctionMemory | None:
        """The function of a traced update; None: the rule of an optimiser does it."""
        name = update.function
        if name is not None and name not in self.updates:
            graph = MachineGraph(self.program.update_function(name).graph)
            self.updates[name] = FunctionMemory.of(graph, "forward")
        return None if name is None else self.updates[name]

    def _is_around_update(self, placed: PlacedStep) -> bool:
        """Whether an instruction brings a variable for an update, or takes it away again."""
        move = placed.instruction
        if placed.micro_batch != _AFTER or not isinstance(move, Load | Store | AllGather):
            return False
        variable = self.variables.get(move.value)
        return variable is None or variable.kind != "accumulator"

    # The effects of instructions on memory.

    def _do(self, placed: PlacedStep) -> None:
        match placed.instruction:
            case Call() as call:
                self._call(placed, call)
            case Receive() as receive:
                self._receive(placed, receive)
            case Accumulate() | Send():
                pass  # as soon as the value is there, so it is live no longer
            case Update() as update:
                numbers = update.numbers or ((),) * len(update.parameters)
                states = [names for _, names in update.states]
                columns = zip(update.parameters, update.gradients, *states, strict=True)
                for row, names in enumerate(columns):
                    self._update(placed, update, row, (*names, *numbers[row]))
            case UpdatePart() as part:
                names = (part.parameter, part.gradient, *part.states, *part.numbers)
                self._update(placed, part, 0, names)
            case Load() as load if self._is_around_update(placed):
                self.ipus[load.ipu].loaded[load.value] = load
            case Store() as store if self._is_around_update(placed):
                self.ipus[store.ipu].loaded.pop(store.value, None)
            case _ if not self._is_around_update(placed):
                self._by_description(placed)

    def _hold_variables(self) -> None:
        for variable in self.variables.values():
            if not variable.off_chip:
                tensor = self._variable(variable, variable.held)
                self.names[variable.name, variable.ipu, _BEFORE] = (tensor,)
                self.ipus[variable.ipu].add(tensor)
        outputs = {output.name: output for output in self.program.outputs}
        for send in (i for i in self.program.walk() if isinstance(i, Send)):
            self._buffers(f"host.{send.stream}", outputs[send.stream].type, send.ipu, send.overlap)

    def _variable(self, variable: Variable, type_: TensorType) -> HeldTensor:
        return HeldTensor(variable.name, type_, self.size(type_), ROLE_OF[variable.kind])

    def _buffers(self, name: str, type_: TensorType, ipu: int, overlap: str) -> HeldTensor:
        """Add the buffers of a host stream; return the one on the tiles that compute."""
        own, *more = (
            self.ipus[ipu].add(HeldTensor(name, type_, self.size(type_), "stream"))
            for _ in range(1 + _ON_IO_TILES[overlap])
        )
        for buffer in more:
            buffer.io_tiles = True
        return own

    def _memory(self, name: str, ipu: int, placed: PlacedStep) -> Held:
        """The memory of a name; empty, if the machine does not have the value."""
        if fetched := self.fetched.get((name, ipu, placed.micro_batch, placed.stage_pass)):
            return (fetched[1],)
        places = (name, ipu, placed.micro_batch), (name, ipu, _AFTER), (name, ipu, _BEFORE)
        return next((self.names[place] for place in places if place in self.names), ())

    def _read(self, memory: Held, ipu: int, step: int, placed: PlacedStep) -> None:
        first, stop = self.ipus[ipu].loop
        for tensor in memory:
            tensor.reads.append((placed.slot, step, placed.weights))
            if tensor.before_loop and first <= step < stop:
                tensor.held.append(stop - 1)

    def _make(self, placed: PlacedStep, name: str, type_: TensorType, ipu: int, step: int) -> Held:
        tensor = HeldTensor(name, type_, self.size(type_), "activation", step)
        tensor.before_loop = placed.micro_batch == _BEFORE
        if self.order.pipelined and placed.micro_batch >= 0:
            tensor.slot, tensor.weights = placed.slot, placed.weights
        return (self.ipus[ipu].add(tensor),)

    def _receive(self, placed: PlacedStep, receive: Receive) -> None:
        stream = self.inputs[receive.stream]
        memory: Held = ()
        if stream.source == "host":  # others are made on the machine
            tensor = self._buffers(stream.name, stream.type, receive.ipu, receive.overlap)
            tensor.slot = 0 if self.order.pipelined else None
            memory = (tensor,)
        self.names[receive.result, receive.ipu, placed.micro_batch] = memory

    def _call(self, placed: PlacedStep, call: Call) -> None:
        ipu, micro_batch, function = call.ipu, placed.micro_batch, self.calls[placed.number]
        arguments = [self._memory(name, ipu, placed) for name in call.arguments]
        start = self.starts[placed.number, micro_batch, ipu]
        results = self._run(placed, ipu, start, function, arguments, call.results)
        for name, memory in zip(call.results, results, strict=True):
            if name:
                self.names[name, ipu, micro_batch] = memory

    def _run(
        self,
        placed: PlacedStep,
        ipu: int,
        start: int,
        function: FunctionMemory,
        arguments: Sequence[Held],
        names: Sequence[str | None],
        shards: int = 1,
    ) -> list[Held]:
        """Run a function; return the memory of its results.

        Args:
            names: of results; empty: they have none.
            shards: of the tensors that it computes, of which this replica has one.
        """
        here = self.ipus[ipu]
        named = {p: n for n, memory in zip(names, function.results, strict=False) for p in memory}
        at = list(arguments)
        for number, piece in enumerate(function.pieces[len(at) :], len(at)):
            at.append(self._piece(placed, ipu, start, piece, named.get(number), shards))
        for number, step in function.reads:
            self._read(at[number], ipu, start + step, placed)
        for step, run in enumerate(function.steps, start):
            here.steps[step] = LiveStep(
                placed.number,
                run.operator.operator,
                run.source,
                placed.micro_batch if placed.micro_batch >= 0 else -1,
                run.operator,
                run.place,
            )
            first = [t for piece in run.operands[0] for t in at[piece]] if run.operands else []
            if len(first) == 1 and run.results and run.end == step - start:
                here.runs[step] = first[0], at[run.results[0]][0]
        return [
            tuple(dict.fromkeys(t for p in memory for t in at[p])) for memory in function.results
        ]

    def _piece(
        self,
        placed: PlacedStep,
        ipu: int,
        start: int,
        piece: MemoryPiece,
        name: str | None,
        shards: int,
    ) -> Held:
        assert piece.type is not None
        type_, constants = piece.type.shard(shards), self.ipus[ipu].constants
        if piece.made is not None:
            return self._make(placed, name or piece.name, type_, ipu, start + piece.made)
        if piece.constant not in constants:
            tensor = HeldTensor(piece.name, type_, self.size(type_), "constant")
            constants[piece.constant] = self.ipus[ipu].add(tensor)
        return (constants[piece.constant],)

    def _update(
        self, placed: PlacedStep, update: Update | UpdatePart, row: int, names: tuple[str, ...]
    ) -> None:
        """Update a parameter, while those of its variables that are loaded are there."""
        ipu, count, function = update.ipu, self._steps_of(update), self._function_of(update)
        here = self.ipus[ipu]
        start = self.starts[placed.number, _AFTER, ipu] + row * count
        arguments = []
        for name in names:
            memory = self._memory(name, ipu, placed)
            if name in here.loaded:
                load = here.loaded[name]
                memory = (here.add(self._variable(self.variables[name], load.type)),)
                memory[0].made = start
                self._through_io_tiles(ipu, load, start)
            arguments.append(memory)
        if function is not None and function.steps:
            own = [self.variables[name] for name in names if name in self.variables]
            shards = max((v.shards for v in own if v.kind != "accumulator"), default=1)
            inputs = sum(piece.type is None for piece in function.pieces)
            given = [*arguments, *[()] * inputs][:inputs]
            self._run(placed, ipu, start, function, given, (), shards)
        else:
            here.steps[start] = LiveStep(placed.number, f"{type(update).__name__} %{names[0]}")
        for memory in arguments:
            self._read(memory, ipu, start + count - 1, placed)

    def _through_io_tiles(self, ipu: int, move: Load | Store, step: int) -> None:
        """Add the buffer of a transfer, if that goes through IO tiles."""
        if move.io_tiles:
            buffer = HeldTensor(move.value, move.type, self.size(move.type), "stream", step)
            buffer.io_tiles = True
            self.ipus[ipu].add(buffer)

    def _by_description(self, placed: PlacedStep) -> None:
        """Do an instruction of one step, as it describes itself."""
        instruction, micro_batch = placed.instruction, placed.micro_batch
        step_on = {ipu: self.starts[placed.number, micro_batch, ipu] for ipu in _ipus(instruction)}
        for ipu, step in step_on.items():
            name, source = type(instruction).__name__, getattr(instruction, "source", "")
            self.ipus[ipu].steps[step] = LiveStep(placed.number, name, source, max(micro_batch, -1))
        for use in (*instruction.reads, *instruction.writes):
            memory = self._memory(use.name, use.ipu, placed)
            self._read(memory, use.ipu, step_on[use.ipu], placed)
        for use in instruction.makes:
            type_ = self.types.get(use.name, use.type)
            made = self._make(placed, use.name, type_, use.ipu, step_on[use.ipu]) if type_ else ()
            self.names[use.name, use.ipu, micro_batch] = made
        for move in instruction.moves:
            self._move(placed, move, step_on)

    def _move(self, placed: PlacedStep, move: Moved, step_on: dict[int, int]) -> None:
        instruction, micro_batch = placed.instruction, placed.micro_batch
        value: Held = ()
        if isinstance(move.src, int):
            value = self._memory(move.value, move.src, placed)
            self._read(value, move.src, step_on[move.src], placed)
        for ipu, step in step_on.items():
            if isinstance(instruction, Load | Store):
                self._through_io_tiles(ipu, instruction, step)
        if not isinstance(move.dst, int):
            return
        step = step_on[move.dst]
        if move.of_variable or move.how == "gathered":
            self._fetch(placed, move, step)
        elif move.makes:
            type_ = self.types.get(move.result, move.type)
            made = self._make(placed, move.result, type_, move.dst, step) if type_ else ()
            for tensor in made:
                if any(source.role == "weight" for source in value):
                    tensor.role = "weight"
                if tensor.slot is not None and isinstance(instruction, Copy):
                    tensor.slot, tensor.arrives = placed.slot + 1, True
            self.names[move.result, move.dst, micro_batch] = made

    def _fetch(self, placed: PlacedStep, move: Moved, step: int) -> None:
        """Bring a variable to an IPU: for a pass, for copies, or for the whole step."""
        assert isinstance(move.dst, int)
        assert move.type is not None
        key = move.result, move.dst, placed.micro_batch, placed.stage_pass
        how, there = self.fetched.get(key, ("", None))
        if how in (move.how, "gathered"):
            return  # another call of the pass has it
        if there is not None:
            there.held.clear()  # a shard is no longer needed once the whole is there
        tensor = self._variable(self.variables[move.result], move.type)
        tensor.made = step
        self.ipus[move.dst].add(tensor)
        if placed.micro_batch >= 0:
            tensor.held.append(
                self.ends.get((placed.stage_pass, placed.micro_batch, move.dst), step)
            )
            tensor.slot = placed.slot if self.order.pipelined else None
        if placed.micro_batch >= 0 or move.how == "gathered":
            self.fetched[key] = move.how, tensor
        else:
            self.names[move.result, move.dst, placed.micro_batch] = (tensor,)


def _functions_of_calls(program: Program, types: dict[str, Seen]) -> dict[int, FunctionMemory]:
    """The memory of the function of each call, by its number; equal calls share it.

    Args:
        types: gets the types of values on the machine.
    """
    found: dict[int, FunctionMemory] = {}
    known: dict[tuple[MachineGraph, str], FunctionMemory] = {}
    calls = machine_calls(program, types)
    for number, (call, graph) in zip(program.numbered_calls(), calls, strict=True):
        key = graph, call.direction
        if key not in known:
            known[key] = FunctionMemory.of(graph, call.direction)
        found[number] = known[key]
    return found


def _outside(number: int, instruction: Plain, section: int) -> PlacedStep:
    """An instruction outside of micro-batches."""
    return PlacedStep(number, instruction, section, -1, 0, False, ())


def _ipus(instruction: Plain) -> tuple[int, ...]:
    """The IPUs that do an instruction, each once."""
    return tuple(dict.fromkeys(instruction.ipus))
