"""Run a program's instructions without tensors, and note when each piece of memory is in use.

It runs several micro-batches one cycle after the other, as the schedule says, and counts. Nothing
in it knows in advance how long a value lives, or of how many micro-batches a pipeline keeps it.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from operator import getitem

from torch import Tensor

from ipu_dynamo.ops.control_flow import branch_op, loop_op
from ipu_dynamo.program import (
    Accumulate,
    AllGather,
    Call,
    Copy,
    Load,
    Receive,
    Repeat,
    Send,
    Store,
    TensorType,
    Update,
    UpdatePart,
    WriteBuffer,
)
from ipu_dynamo.program.machine_marks import mark_of
from ipu_dynamo.program.machine_operators import MachineGraph, machine_calls
from ipu_dynamo.program.schedule.planning import schedule_of
from ipu_dynamo.program.schedule.sections import sections

EMPTY = ("full", "zeros", "ones", "empty", "new_full", "new_zeros", "new_ones", "new_empty")
EMPTY = {*EMPTY, "full_like", "zeros_like", "ones_like", "empty_like", "scalar_tensor", "fill"}
BEFORE = -100  # the cycle of what is done before all micro-batches
MORE_BUFFERS = {"no_overlap": 0, "accumulation_loop": 1, "device_iteration_loop": 2}


@dataclass(eq=False)
class Cell:
    """A piece of memory of one IPU.

    Args:
        key: what makes it, the same for all micro-batches.
        kind: `always`, `stream` or `value`; `variable` is a value that has been fetched.
        born: time, cycle and micro-batch.
        uses: times and cycles.
    """

    ipu: int
    nbytes: int
    kind: str
    key: tuple = ()
    born: tuple[int, int, int] = (0, 0, -1)
    arrived: bool = False
    uses: list[tuple[int, int]] = field(default_factory=list)
    alive: list[tuple[int, int]] = field(default_factory=list)
    ringed: bool = False


def operator_kind(node):
    return str(node.target).removeprefix("aten.").split(".")[0]


def fetches(i):
    """Whether an instruction brings a variable to an IPU."""
    return isinstance(i, AllGather) or (isinstance(i, Load) and i.value == i.result)


class Interpreter:
    """All that the IPUs of a program do in a step; `bytes_of` says what they hold meanwhile."""

    def __init__(self, program, size, in_place):
        self.program, self.size, self.in_place = program, size, in_place
        cut = sections(program)
        plain = [(n, i) for n, i in enumerate(program.walk()) if not isinstance(i, Repeat)]
        first, last = len(cut.before), len(cut.before) + len(cut.loop)
        self.before, self.loop, self.after = plain[:first], plain[first:last], plain[last:]
        self.variables = {variable.name: variable for variable in program.variables}
        self.types = {}
        graphs = list(machine_calls(program, self.types))
        numbers = [n for n, i in plain if isinstance(i, Call)]
        self.graphs = {n: graph for n, (_, graph) in zip(numbers, graphs, strict=True)}
        self.times = [0] * program.num_ipus  # how many steps each IPU has done
        self.starts = [{} for _ in range(program.num_ipus)]  # of each IPU: cycle -> time
        self.run_ends = {}  # ipu, cycle, micro-batch -> time at which its passes end
        self.cells, self.env, self.constants = [], {}, {}
        self.operations = []  # in order of time: ipu, time, first operand, result, operator
        self.fetched = {}  # what a pass has on an IPU: name, IPU, micro-batch, pass -> kind, cell
        self.pass_of, self.stage_pass = {}, -1
        self.pending = {}
        self.cycle, self.micro_batch = BEFORE, -1
        self.prepare()
        self.run()

    # -- memory --------------------------------------------------------------------------------

    def cell(self, ipu, type_, kind="value", key=(), nbytes=None):
        nbytes = self.size(type_) if nbytes is None else nbytes
        born = (self.times[ipu], self.cycle, self.micro_batch)
        made = Cell(ipu, nbytes, kind, (ipu, *key), born)
        self.cells.append(made)
        return made

    def use(self, cells, time=None):
        for cell in cells:
            now = self.times[cell.ipu] if time is None else time
            cell.uses.append((now, self.cycle))

    def get(self, name, ipu):
        if (key := (name, ipu, self.micro_batch, self.stage_pass)) in self.fetched:
            return frozenset({self.fetched[key][1]})
        for micro_batch in (self.micro_batch, -1):
            if (name, ipu, micro_batch) in self.env:
                return self.env[name, ipu, micro_batch]
        return frozenset()

    def put(self, name, ipu, cells):
        self.env[name, ipu, self.micro_batch] = frozenset(cells)

    def prepare(self):
        for variable in self.variables.values():
            if not variable.off_chip:
                self.put(
                    variable.name,
                    variable.ipu,
                    [self.cell(variable.ipu, variable.held, "always")],
                )
        self.outputs = {output.name: output for output in self.program.outputs}
        self.inputs = {stream.name: stream for stream in self.program.inputs}
        for _, instruction in self.loop:
            if isinstance(instruction, Send):
                output = self.outputs[instruction.stream]
                for _ in range(1 + MORE_BUFFERS[instruction.overlap]):
                    self.cell(instruction.ipu, output.type, "always")

    # -- order ---------------------------------------------------------------------------------

    def run(self):
        program = self.program
        together = schedule_of(program, micro_batches=2, replicas=1, workers=None)
        self.pipelined = program.order == "pipelined" and len(together.workers) > 1
        for number, instruction in self.before:
            self.do(number, instruction)
        self.fetched = {}
        self.loop_start = list(self.times)
        passes = self.passes()
        self.pass_of = {n: index for index, of in enumerate(passes) for n, _ in of}
        count = sections(program).micro_batches
        phases = [next((i.phase for _, i in of if isinstance(i, Call)), None) for of in passes]
        phased = any(phase is not None for phase in phases)
        cycles = defaultdict(list)
        if self.pipelined:
            batches = 4 * len(passes) + 2
            schedule = schedule_of(program, micro_batches=batches, replicas=1, workers=None)
            for of in schedule.runs:
                for run in of:
                    cycles[run.cycle].append((run.index, run.micro_batch))
        elif phased:
            two = len(together.workers) > 1 and count > 1
            for batch in range(1 + two):
                for index, of in enumerate(passes):
                    cycles[phases[index] + batch].append((index, batch))
                    for _, i in of:
                        if getattr(i, "phase", None) is not None:
                            cycles[i.phase + batch]  # so that it exists
        else:
            cycles = {index: [(index, 0)] for index in range(len(passes))}
        weights = [any(i.direction == "weights" for _, i in of if isinstance(i, Call))
                   for of in passes]  # fmt: skip
        for cycle in sorted(cycles):
            self.cycle = cycle
            for ipu in range(program.num_ipus):
                self.starts[ipu][cycle] = self.times[ipu]
            batches = range(2 if phased else 0)
            if phased:
                self.transfers(passes, batches, cycles, cycle, (Load, AllGather))
            for index, batch in sorted(cycles[cycle], key=lambda run: (weights[run[0]], *run)):
                self.micro_batch = batch
                self.stage_pass = index
                self.run_pass(passes[index], weights=weights[index])
                self.stage_pass = -1
            if phased:
                self.transfers(passes, batches, cycles, cycle, (Store,))
            if self.pipelined:
                copies = [(n, i, batch) for index, batch in cycles[cycle] for n, i in passes[index]
                          if isinstance(i, Copy)]  # fmt: skip
                for number, instruction, batch in sorted(copies, key=lambda copy: copy[0]):
                    self.micro_batch = batch
                    self.do(number, instruction)
        self.cycles = cycles
        self.full = next(
            (c for c in sorted(cycles) if len({index for index, _ in cycles[c]}) == len(passes)), 0
        )
        for ipu in range(program.num_ipus):
            self.starts[ipu][max(cycles, default=0) + 1] = self.times[ipu]
        for cell in self.cells:  # every micro-batch reads it
            if cell.born[1] == BEFORE and any(cycle > BEFORE for _, cycle in cell.uses):
                cell.uses.append((self.times[cell.ipu] - 1, self.cycle))
        self.loop_end = list(self.times)
        self.cycle, self.micro_batch = max(cycles, default=0) + 1, -1
        for number, instruction in self.after:
            self.do(number, instruction, after=True)

    def passes(self):
        """The instructions of each stage pass; what fetches belongs to the next one there."""
        calls = [i for _, i in self.loop if isinstance(i, Call)]
        of_call, found = [], -1
        for place, call in enumerate(calls):
            found += place == 0 or call.stage_pass != calls[place - 1].stage_pass
            of_call.append(found)
        passes = [[] for _ in range(found + 1)] or [[]]
        done = 0
        for number, i in self.loop:
            index = of_call[max(done - 1, 0)] if calls else 0
            if isinstance(i, Call):
                index, done = of_call[done], done + 1
            elif isinstance(i, Receive) or fetches(i):
                index = of_call[done] if not isinstance(i, Receive) else 0
            elif isinstance(i, Load):
                index = min(of_call[n] for n, c in enumerate(calls) if n >= done and c.ipu == i.ipu)
            elif isinstance(i, Store | Send):
                index = max(of_call[n] for n, c in enumerate(calls) if n < done and c.ipu == i.ipu)
            passes[index].append((number, i))
        return passes

    def transfers(self, passes, batches, cycles, cycle, kinds):
        of_batches = {batch for runs in cycles.values() for _, batch in runs}
        for batch in sorted(of_batches):
            self.micro_batch = batch
            moves = [(n, i) for of in passes for n, i in of if isinstance(i, kinds)]
            for number, i in sorted(moves, key=lambda move: move[0]):
                if i.phase is not None and i.phase + batch == cycle:
                    self.stage_pass = self.pass_of[number]
                    self.do(number, i)
                    self.stage_pass = -1

    def run_pass(self, instructions, *, weights):
        made, late, ends = set(), [], {}
        brings = [move for move in instructions if fetches(move[1])]
        for number, i in brings:
            if i.phase is None:
                self.do(number, i)
        for number, i in instructions:
            made |= set(i.made_names)
            if fetches(i) or (isinstance(i, Load | Store) and i.phase is not None):
                continue
            if isinstance(i, Copy) and self.pipelined:
                continue
            if isinstance(i, Store | WriteBuffer) or (isinstance(i, Copy) and i.value in made):
                late.append((number, i))
                continue
            self.do(number, i)
            if isinstance(i, Call):
                ends[i.ipu] = self.times[i.ipu] - 1
                if not weights:
                    self.run_ends[i.ipu, self.cycle, self.micro_batch] = ends[i.ipu]
        for key in [key for key in self.fetched if key[2:] == (self.micro_batch, self.stage_pass)]:
            _, cell = self.fetched.pop(key)
            self.use([cell], max(ends[cell.ipu], cell.born[0]))
        for number, i in late:
            self.do(number, i)

    # -- instructions --------------------------------------------------------------------------

    def do(self, number, i, after=False):
        if isinstance(i, Call):
            self.call(number, i)
        elif isinstance(i, Receive):
            stream, cells = self.inputs[i.stream], []
            if stream.source == "host":
                cells = [self.cell(i.ipu, stream.type, "stream", (number, self.micro_batch % 2))]
                if self.pipelined:
                    cells[0].key = (i.ipu, number)
                for extra in range(MORE_BUFFERS[i.overlap]):
                    self.cell(i.ipu, stream.type, "stream", (number, "more", extra))
            self.put(i.result, i.ipu, cells)
        elif isinstance(i, Accumulate | Send):
            return
        elif isinstance(i, Update | UpdatePart):
            self.update(number, i)
        elif after and isinstance(i, Load | Store | AllGather) and not self.sums(i.value):
            if isinstance(i, Load):
                self.pending[i.value] = i
            elif isinstance(i, Store):
                self.pending.pop(i.value, None)
        else:
            self.other(number, i)

    def sums(self, name):
        return name in self.variables and self.variables[name].kind == "accumulator"

    def other(self, number, i):
        ipus = list(dict.fromkeys(i.ipus))
        for use in (*i.reads, *i.writes):
            self.use(self.get(use.name, use.ipu))
        made = [(use.name, use.ipu, self.types.get(use.name, use.type)) for use in i.makes]
        for name, ipu, type_ in made:
            cells = [] if type_ is None else [self.cell(ipu, type_, key=(number, name))]
            self.put(name, ipu, cells)
        for move in i.moves:
            if isinstance(move.src, int):
                self.use(self.get(move.value, move.src))
            if getattr(i, "io_tiles", False):
                ipu = move.src if isinstance(move.src, int) else move.dst
                self.use([self.cell(ipu, move.type, key=(number, "io", self.times[ipu]))])
            if isinstance(i, Store) and move.of_variable:
                del self.env[move.value, move.src, -1]
            if not isinstance(move.dst, int):
                continue
            if move.of_variable or isinstance(i, AllGather):
                self.fetch(number, i, move)
            elif move.makes:
                type_ = self.types.get(move.result, move.type)
                cells = []
                if type_ is not None:
                    cells = [self.cell(move.dst, type_, key=(number, move.result))]
                    if isinstance(i, Copy) and self.pipelined and self.micro_batch >= 0:
                        time, cycle, batch = cells[0].born
                        cells[0].born, cells[0].arrived = (time, cycle + 1, batch), True
                self.put(move.result, move.dst, cells)
        for ipu in ipus:
            self.times[ipu] += 1

    def fetch(self, number, i, move):
        """Bring a variable to an IPU, unless the pass has got it for a call before."""
        key = move.result, move.dst, self.micro_batch, self.stage_pass
        kind = type(i).__name__
        if self.fetched.get(key, ("",))[0] in (kind, "AllGather"):
            return
        cell = self.cell(move.dst, move.type, "variable", (number,))
        if self.micro_batch < 0 and isinstance(i, Load):
            self.put(move.result, move.dst, [cell])
        else:
            self.fetched[key] = kind, cell

    def call(self, number, call):
        arguments = [self.get(name, call.ipu) for name in call.arguments]
        graph = self.graphs[number]
        results = self.graph(call.ipu, graph, arguments, (number,), call.direction)
        for name, cells in zip(call.results, results, strict=True):
            if name:
                self.put(name, call.ipu, cells)

    def update(self, number, i):
        if isinstance(i, UpdatePart):
            rows = [(i.parameter, i.gradient, *i.states, *i.numbers)]
        else:
            numbers = i.numbers or [()] * len(i.parameters)
            states = [names for _, names in i.states]
            rows = [
                (name, i.gradients[k], *(of[k] for of in states), *numbers[k])
                for k, name in enumerate(i.parameters)
            ]
        for row in rows:
            start, arguments, own = self.times[i.ipu], [], []
            for name in row:
                cells = self.get(name, i.ipu)
                if name in self.pending:
                    cells = {self.cell(i.ipu, self.pending[name].type, "variable", (number, name))}
                    own += cells
                    if self.pending[name].io_tiles:
                        key = number, name, "io"
                        self.use([self.cell(i.ipu, self.pending[name].type, key=key)])
                arguments.append(frozenset(cells))
            if i.function is not None:
                graph = MachineGraph(self.program.update_function(i.function).graph)
                shards = [self.variables[n].shards for n in row
                          if n in self.variables and not self.sums(n)]  # fmt: skip
                places = len(graph.graph.graph.find_nodes(op="placeholder"))
                given = (arguments + [frozenset()] * places)[:places]
                key = number, row[0]
                self.graph(i.ipu, graph, given, key, "forward", max(shards, default=1))
            if self.times[i.ipu] == start:
                self.times[i.ipu] += 1
            for cells in (*arguments, own):
                self.use(cells, self.times[i.ipu] - 1)

    # -- graphs --------------------------------------------------------------------------------

    def graph(self, ipu, graph, inputs, key, direction, shards=1):
        run = {op.node: op for op in graph.listed(direction)}
        cells, given = {}, iter(inputs)

        def look(node):
            """The memory of a value: of what it is a view of, or of all it is made of."""
            if node not in cells:
                sources = node.all_input_nodes
                if operator_kind(node) in EMPTY and not mark_of(node).nothing:
                    sources = []
                elif node.target is getitem or getattr(node.target, "is_view", False):
                    sources = sources[:1]
                cells[node] = frozenset(c for source in sources for c in look(source))
            return cells[node]

        for node in graph.graph.graph.nodes:
            if node.op == "placeholder":
                cells[node] = next(given) if graph.value(node) is not None else frozenset()
            elif node in run:
                self.operator(ipu, graph, run[node], cells, look, (*key, node.name), shards)
            elif node.op == "call_function" and not node.all_input_nodes:
                self.constant(ipu, node, cells, shards, read=node in graph.needed)
        (output,) = graph.graph.graph.find_nodes(op="output")
        return [look(node) if node is not None else frozenset() for node in output.args[0]]

    def constant(self, ipu, node, cells, shards, *, read):
        kind = operator_kind(node)
        cells[node] = frozenset()
        random = "nondeterministic_seeded" in str(node.target.tags)
        value = node.meta["val"]
        made = read and not random and not mark_of(node).nothing
        if made and kind not in EMPTY and isinstance(value, Tensor):
            type_ = TensorType.of(value).shard(shards)
            key = ipu, str(node.target), str(node.args), str(dict(node.kwargs)), type_
            if key not in self.constants:
                self.constants[key] = self.cell(ipu, type_, "always")
            cells[node] = frozenset({self.constants[key]})

    def operator(self, ipu, graph, operator, cells, look, key, shards):
        node = operator.node
        operands = [look(value) for value in graph.operands(node) if graph.value(value)]
        parts = {None: node}
        if not isinstance(node.meta["val"], Tensor):
            parts = {p.args[1]: p for p in node.users if p.target is getitem and p in graph.needed}
        made = []
        for place, part in parts.items():
            cells[part] = frozenset()
            if graph.value(part) is not None:
                type_ = graph.value(part).shard(shards)
                made.append(self.cell(ipu, type_, key=(*key, place)))
                cells[part] = frozenset({made[-1]})
        start = self.times[ipu]
        self.times[ipu] += 1
        if operator.bodies:
            self.bodies(ipu, graph, operator, cells, look, key, parts)
        elif made and operands and len(operands[0]) == 1:
            (first,) = operands[0]
            self.operations.append((ipu, start, first, made[0], operator))
        self.use([c for operand in operands for c in operand], self.times[ipu] - 1)
        self.use(made, self.times[ipu] - 1)

    def bodies(self, ipu, graph, operator, cells, look, key, parts):
        node = operator.node
        lists = {loop_op: node.args[:3], branch_op: node.args[1:2]}.get(node.target, node.args[:2])
        inputs = [look(value) for values in lists for value in values]
        own = []
        for place, value in enumerate(lists[0] if node.target is not branch_op else []):
            inputs[place] = cells[parts[place]] if place in parts else frozenset()
            if place not in parts and graph.value(value) is not None:
                born = self.cell(ipu, graph.value(value), key=(*key, "carried", place))
                born.born = (self.times[ipu] - 1, *born.born[1:])
                own.append(born)
                inputs[place] = frozenset({born})
        for number, (body, op) in enumerate(zip(graph.bodies(node), operator.bodies, strict=True)):
            del op
            results = self.graph(ipu, body, inputs, (*key, number), operator.direction)
            self.use([c for result in results for c in result], self.times[ipu] - 1)
        self.use(own, self.times[ipu] - 1)

    # -- counting ------------------------------------------------------------------------------

    def bytes_of(self, ipu):
        """Bytes at each step: before the micro-batches, in one full cycle, and after them."""
        unread = {
            cell
            for variable in self.variables.values()
            for cell in self.env.get((variable.name, variable.ipu, -1), ())
            if variable.kind == "constant" and not cell.uses
        }
        cells = [cell for cell in self.cells if cell.ipu == ipu and cell not in unread]
        groups = defaultdict(list)
        for cell in cells:
            groups[cell.key].append(cell)
        always = sum(cell.nbytes for cell in cells if cell.kind == "always")
        for group in groups.values():
            if group[0].kind == "stream":
                always += group[0].nbytes
            if self.pipelined and group[0].kind != "always":
                always += self.ring(group)
        for cell in cells:
            if cell.kind in ("value", "variable") and not cell.ringed:
                cell.alive = [(cell.born[0], max([cell.born[0], *(t for t, _ in cell.uses)]))]
        for where, time, first, made, operator in self.operations:
            if where != ipu or first.kind != "value" or first.ringed or made is first:
                continue
            ends = first.alive and first.alive[0][1] == time
            if ends and first.nbytes == made.nbytes and self.in_place(operator):
                first.alive = [(first.alive[0][0], time - 1)]
        window = [*range(self.loop_start[ipu])]
        if self.pipelined:
            window += range(self.starts[ipu][self.full], self.starts[ipu][self.full + 1])
        else:
            window += range(self.loop_start[ipu], self.loop_end[ipu])
        window += range(self.loop_end[ipu], self.times[ipu])
        alive = [(cell.nbytes, span) for cell in cells for span in cell.alive]
        return [
            always + sum(nbytes for nbytes, (first, last) in alive if first <= time <= last)
            for time in window
        ]

    def ring(self, group):
        """Bytes of the ring that values wait in for later cycles; 0: no value waits."""
        group = [cell for cell in group if cell.born[2] >= 0]

        def birth(cell):
            if cell.kind == "stream":
                return min((cycle for _, cycle in cell.uses), default=0)
            return cell.born[1]

        if not any(cycle > birth(cell) for cell in group for _, cycle in cell.uses):
            return 0
        waiting = []
        for cell in group:
            end = self.run_ends.get((cell.ipu, birth(cell), cell.born[2]), cell.born[0])
            waiting.append((end, max([end, *(time for time, _ in cell.uses)])))
        most = max(sum(first <= at <= last for first, last in waiting) for at, _ in waiting)
        if most == 1:  # it waits at the end of a step, when no other micro-batch has one
            return 0
        for cell, (end, _) in zip(group, waiting, strict=True):
            cell.ringed = True
            begin = cell.born[0]
            cell.alive = [(begin, max(begin, end))] if cell.kind != "stream" else []
        return most * group[0].nbytes
