"""Price all that a step of a program consists of, before a schedule says when it is done."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ipu_dynamo.machine.call_costs import Argument, price_call
from ipu_dynamo.machine.computed_costs import ComputedCosts
from ipu_dynamo.machine.cost import Cost, Resources
from ipu_dynamo.machine.costs.basics import machine_bytes
from ipu_dynamo.machine.operator_rows import OperatorRows
from ipu_dynamo.machine.predicted_operators import CallRow, Cycles, Where
from ipu_dynamo.machine.predicted_time import Work
from ipu_dynamo.machine.system import System
from ipu_dynamo.machine.transfer_times import MoveTimes, TimedMove
from ipu_dynamo.ops.library.host_call import calls_host
from ipu_dynamo.program.ir.base_instruction import BaseInstruction
from ipu_dynamo.program.ir.instructions import Call, Plain
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import (
    MachineOperator,
    Values,
    machine_operators,
    machine_values,
)
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import Sections, sections
from ipu_dynamo.program.schedule.stage_passes import (
    StagePass,
    calls_of_passes,
    instructions_of_passes,
)

_WEIGHTS = ("parameter", "buffer", "constant")
_WORK: Mapping[str, Work] = {"replicas": "replicas", "off chip": "off chip", "host": "host"}


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Something that an IPU does before it does the next thing.

    Args:
        operators: its cycles in columns, of calls and writes.
        call: its position among the calls; -1 for other work.
    """

    ipu: int
    work: Work
    name: str
    cycles: int
    operators: Cycles = field(default_factory=Cycles)
    call: int = -1


@dataclass(frozen=True, slots=True)
class PassWork:
    """The work of a stage pass for a micro-batch, except for host transfers and copies."""

    name: str
    ipu: int
    items: tuple[WorkItem, ...]
    instructions: tuple[Plain, ...]

    @property
    def cycles(self) -> int:
        return sum(item.cycles for item in self.items)


@dataclass(frozen=True, slots=True)
class PricedCall:
    """A call with its operators, and a row for each."""

    call: Call
    operators: tuple[MachineOperator, ...]
    costs: tuple[Cost, ...]
    rows: tuple[int, ...]


@dataclass
class StepCosts:
    """The costs of a step of a program on a system."""

    program: Program
    system: System
    rows: OperatorRows = field(default_factory=OperatorRows)

    @cached_property
    def cut(self) -> Sections:
        return sections(self.program)

    @cached_property
    def calls(self) -> tuple[PricedCall, ...]:
        """The calls of a micro-batch, in order."""
        known: dict[object, list[PricedCall]] = {}
        priced = []
        arguments = self._arguments()
        for (call, operators), of_call in zip(
            machine_operators(self.program), arguments, strict=True
        ):
            alike = known.setdefault((call.function, call.direction, call.ipu, of_call), [])
            same = next((one for one in alike if one.operators == operators), None)
            if same is None:
                costs = price_call(operators, of_call, self.resources(call.ipu))
                pairs = zip(operators, costs, strict=True)
                rows = tuple(self.rows.operator(operator, cost) for operator, cost in pairs)
                same = PricedCall(call, operators, costs, rows)
                alike.append(same)
            one = PricedCall(call, same.operators, same.costs, same.rows)
            self._use(one)
            priced.append(one)
        return tuple(priced)

    @cached_property
    def call_rows(self) -> tuple[CallRow, ...]:
        """The calls in program order, as rows of a prediction."""
        names = [name for name, instructions in self._named_passes for i in instructions
                 if isinstance(i, Call)]  # fmt: skip
        return tuple(
            CallRow(
                name=name,
                ipu=priced.call.ipu,
                stage=priced.call.stage,
                direction=priced.call.direction,
                block=self.rows.block(priced.call.function, priced.rows),
                cycles=self.cycles_of(priced).total,
                line=priced.call.source,
            )
            for name, priced in zip(names, self.calls, strict=True)
        )

    @cached_property
    def passes(self) -> tuple[PassWork, ...]:
        """The stage passes of a micro-batch, in program order."""
        numbers = iter(range(len(self.calls)))
        works = []
        for name, instructions in self._named_passes:
            items: list[WorkItem] = []
            hidden: Counter[int] = Counter()
            for instruction in instructions:
                if isinstance(instruction, Call):
                    items += self._call(next(numbers), name)
                    continue
                items += self._writes(instruction)
                for move in self.transfers.moves(instruction):
                    if move.route == "host":
                        continue
                    if move.hidden and self._computes(move.move.phase, move.ipu):
                        hidden[move.ipu] += move.cycles
                    else:
                        items.append(_moved(move))
            ipu = next(i.ipu for i in instructions if isinstance(i, Call)) if items else 0
            works.append(PassWork(name, ipu, _beside(items, hidden), tuple(instructions)))
        return tuple(works)

    @cached_property
    def host(self) -> tuple[TimedMove, ...]:
        """The host transfers of a micro-batch."""
        moves = (move for i in self.cut.loop for move in self.transfers.moves(i))
        return tuple(move for move in moves if move.route == "host")

    def around(self, instructions: Sequence[Plain]) -> tuple[WorkItem, ...]:
        """The work of IPUs before or after the micro-batches of a step."""
        items: list[WorkItem] = []
        hidden: Counter[int] = Counter()
        for instruction in instructions:
            items += self._updates(instruction)
            for move in self.transfers.moves(instruction):
                if move.hidden:
                    hidden[move.ipu] += move.cycles
                else:
                    items.append(_moved(move))
            for pair, cycles in self.transfers.copies([instruction]).items():
                items += [WorkItem(ipu, "copy", "copy", cycles) for ipu in pair]
        return _beside(items, hidden, work="update")

    def cycles_of(self, priced: PricedCall) -> Cycles:
        """The cycles of one run of a call."""
        return Cycles.sum(self.rows.rows[row].cycles for row in priced.rows)

    def resources(self, ipu: int) -> Resources:
        """The resources of an IPU for operators."""
        shares = self.program.memory_proportions
        everywhere = Resources(self.system.ipu, io_tiles=self.program.io_tiles)
        return replace(everywhere, proportion=shares[ipu]) if shares else everywhere

    @cached_property
    def transfers(self) -> MoveTimes:
        return MoveTimes(self.program, self.system, self._held, self._shards)

    @cached_property
    def _named_passes(self) -> list[tuple[str, list[Plain]]]:
        loop = self.cut.loop
        names = Schedule(tuple(map(StagePass.of, calls_of_passes(loop))), ()).names
        passes = instructions_of_passes(loop)
        return list(zip(names, passes, strict=True)) if names else [("", passes[0])]

    @cached_property
    def _types(self) -> Mapping[str, TensorType]:
        """The types of all names on the machine, of values and variables."""
        types: dict[str, TensorType] = {}
        functions = {function.name: function for function in self.program.functions}
        streams = {stream.name: stream.type for stream in self.program.inputs}
        for instruction in self.cut.all:
            types |= {use.name: use.type for use in instruction.makes if use.type is not None}
            for move in instruction.moves:
                made = streams.get(move.value) if move.src == "host" else move.type
                if move.makes and made is not None:
                    types[move.result] = made
            if isinstance(instruction, Call):
                made_types = functions[instruction.function].outputs
                pairs = zip(instruction.results, made_types, strict=True)
                types |= {name: type_ for name, type_ in pairs if name and type_}
        seen: Values = machine_values(self.program)
        types |= {name: type_ for name, type_ in seen.items() if type_ is not None}
        return types | {variable.name: variable.held for variable in self.program.variables}

    @cached_property
    def _shards(self) -> Mapping[str, int]:
        """In how many parts replicas have the sums of gradients that they scatter."""
        moves = (move for i in self.cut.all for move in i.moves if move.how == "scattered")
        shards = {move.value: move.shards for move in moves if move.shards}
        held = {variable.name for variable in self.program.variables if variable.shards > 1}
        return {name: count for name, count in shards.items() if name not in held}

    def _held(self, name: str) -> TensorType:
        return self._types[name]

    @cached_property
    def _computed(self) -> dict[int, ComputedCosts]:
        """The prices of arithmetic, by IPU."""
        functions = {function.name: function for function in self.program.update_functions}
        return {
            ipu: ComputedCosts(self.resources(ipu), functions, self._held, self._shards)
            for ipu in range(self.program.num_ipus)
        }

    def _arguments(self) -> Iterator[tuple[Argument, ...]]:
        """Classify the arguments of each call: a weight, a host input or another value."""
        weights = {v.name for v in self.program.variables if v.kind in _WEIGHTS}
        variables = {variable.name for variable in self.program.variables}
        received: set[str] = set()
        readers: Counter[str] = Counter()
        last: dict[str, int] = {}
        for position, instruction in enumerate(self.cut.all):
            for name in dict.fromkeys(instruction.read_names):
                readers[name] += 1
                last[name] = position
            for move in instruction.moves:
                if move.value in weights and move.makes:
                    weights.add(move.result)
                if move.src == "host":
                    received.add(move.result)
        for position, instruction in enumerate(self.cut.all):
            if not isinstance(instruction, Call):
                continue
            arguments = []
            for name in instruction.arguments:
                if name in weights:
                    arguments.append(Argument("weight"))
                    continue
                alone = name in received and readers[name] == 1
                dies = last[name] == position and name not in variables
                arguments.append(Argument("host" if alone else "value", dies))
            yield tuple(arguments)

    def _use(self, priced: PricedCall) -> None:
        """Count the operators of a call, each for the module of the parameter that it reads."""
        module = ""
        for operator, row in zip(priced.operators, priced.rows, strict=True):
            named = (priced.call.arguments[s] for s in operator.sources if isinstance(s, int))
            module = next((_module(name) for name in named if name in self._parameters), module)
            self.rows.use(row, priced.call.ipu, priced.call.stage, module)

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(
            v.name for v in self.program.variables if v.kind in ("parameter", "buffer")
        )

    def _call(self, number: int, name: str) -> Iterator[WorkItem]:
        """A call, and the streams to the host and back for its host functions."""
        priced = self.calls[number]
        cycles, ipu = self.cycles_of(priced), priced.call.ipu
        yield WorkItem(ipu, "call", name, cycles.total, cycles, number)
        for operator in priced.operators:
            if operator.node is not None and calls_host(operator.node):
                for types in (operator.operands, operator.results):
                    streamed = self.transfers.host_bytes(machine_bytes(*types))
                    yield WorkItem(ipu, "host", "call of the host", streamed)

    def _writes(self, instruction: BaseInstruction) -> Iterator[WorkItem]:
        """The arithmetic of an instruction in a micro-batch."""
        cycles = self._arithmetic(instruction, "backward")
        if cycles.total:
            (ipu,) = instruction.ipus
            yield WorkItem(ipu, "write", _name(instruction), cycles.total, cycles)

    def _updates(self, instruction: BaseInstruction) -> Iterator[WorkItem]:
        """The arithmetic of an instruction around the micro-batches."""
        if not instruction.computes:
            return
        (ipu,) = instruction.ipus
        cycles = self._arithmetic(instruction, "around").total
        if cycles:
            yield WorkItem(ipu, "update", _name(instruction), cycles)
        sent = [
            c.over for c in instruction.computes if c.rule is not None and c.rule.kind == "host"
        ]
        nbytes = sum(machine_bytes(self._held(name)) for name in sent)
        if nbytes:
            yield WorkItem(ipu, "host", "gradients", self.transfers.host_bytes(nbytes))

    def _arithmetic(self, instruction: BaseInstruction, where: Where) -> Cycles:
        """The cycles of an instruction's arithmetic; adds a row for each part."""
        total = Cycles()
        for computed in instruction.computes:
            (ipu,) = instruction.ipus
            costs = self._computed[ipu]
            cost = costs.price(computed)
            if not cost.cycles:
                continue
            does = computed.does if computed.rule is None else f"update {computed.rule.kind}"
            named = f"@{computed.function}" if computed.function else f"{_name(instruction)} {does}"
            over = [costs.held(computed.over)] if computed.over else []
            line = str(getattr(instruction, "source", ""))
            row = self.rows.row(named, over, over, line, where, cost, 2 * machine_bytes(*over))
            stage = getattr(instruction, "stage", -1)
            self.rows.use(row, ipu, stage, _module(computed.over.partition("..")[0]))
            total += self.rows.rows[row].cycles
        return total

    def _computes(self, phase: int | None, ipu: int) -> bool:
        """Whether an IPU computes while it transfers in a phase; without phases it does."""
        if phase is None:
            return True
        return any(p.call.phase == phase and p.call.ipu == ipu for p in self.calls)


def _name(instruction: BaseInstruction) -> str:
    return type(instruction).__name__


def _module(name: str) -> str:
    """The module of a parameter."""
    return name.rpartition(".")[0]


def _moved(move: TimedMove) -> WorkItem:
    return WorkItem(move.ipu, _WORK[move.route], move.move.how, move.cycles)


def _beside(
    items: Iterable[WorkItem], hidden: Mapping[int, int], work: Work = "call"
) -> tuple[WorkItem, ...]:
    """The items, and the part of hidden transfers that outlasts the computation."""
    every = [item for item in items if item.cycles]
    for ipu, cycles in hidden.items():
        busy = sum(i.cycles for i in every if i.ipu == ipu and i.work in (work, "write"))
        if cycles > busy:
            every.append(WorkItem(ipu, "off chip", "through IO tiles", cycles - busy))
    return tuple(every)
