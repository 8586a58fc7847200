"""Join functions with the writes that follow their calls: compiled code writes in place.

Before   (%t, %g) = call @step0(%w, %x);  accumulate (%w..grad) += (%g)
After    (%t) = call @step0(%w, %x, %w..grad), where aten.add_(%w..grad, %g) follows what makes %g
Keeps    the value of every variable after each stage pass of a micro-batch, to the bit; the
         program, next to the result. Sums are written in the order of the instructions.
Source   design of this project: a gradient is read while it is in the cache, and not kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.graph.add_writes import GraphWrite, add_writes, drop_own_memory
from ipu_dynamo.passes.graph.builder import new_input
from ipu_dynamo.passes.graph.extract import copy_of
from ipu_dynamo.passes.host.functions.rewrite_functions import with_functions
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import (
    Accumulate,
    Call,
    Function,
    HostProgram,
    Program,
    Variable,
    Write,
    WriteBuffer,
    graph_outputs,
    make_function,
)


@dataclass(frozen=True, slots=True)
class Joined:
    """A call and the writes after it.

    Args:
        number: of the call in the program.
        writes: those that its function does.
        kept: its results that something else reads than a write, or nothing at all.
        separate: writes for a call of their own, after it.
        instructions: those of the writes, by number.
    """

    number: int
    call: Call
    writes: tuple[Write, ...]
    kept: tuple[int, ...]
    separate: tuple[Write, ...]
    instructions: Mapping[int, Accumulate | WriteBuffer]


def plan(program: Program) -> list[Joined]:
    """Decide which writes to join with which call. Reads the program only."""
    calls = program.numbered_calls()
    behind: dict[int, dict[int, Accumulate | WriteBuffer]] = {number: {} for number in calls}
    read: set[str | None] = set()
    last = 0
    for number, instruction in enumerate(program.walk()):
        if number in calls:
            last = number
        if isinstance(instruction, Accumulate | WriteBuffer):
            behind[last][number] = instruction
        else:
            read.update(instruction.read_names)
    # A block that several calls share stays one: buffers, which only its last call writes, are
    # written by a call of their own.
    without = {call.function for n, call in calls.items() if not _has_buffers(behind[n].values())}
    split = []
    for number, call in calls.items():
        writes = [write for one in behind[number].values() for write in one.written]
        separate = [w for w in writes if w.rule == "buffer" and call.function in without]
        split.append((tuple(w for w in writes if w not in separate), tuple(separate)))
        results = set(call.results)
        read.update(write.value for write in separate)
        read.update(write.value for write in writes if write.value not in results)
    joined = []
    for (number, call), (inside, later) in zip(calls.items(), split, strict=True):
        taken = {write.value for write in inside}
        kept = [i for i, name in enumerate(call.results) if name in read or name not in taken]
        joined.append(Joined(number, call, inside, tuple(kept), later, behind[number]))
    return joined


def _has_buffers(instructions: Iterable[Accumulate | WriteBuffer]) -> bool:
    return any(isinstance(instruction, WriteBuffer) for instruction in instructions)


class _Writer:
    """Makes functions that write.

    Args:
        program: whose calls and functions they are for.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.variables = {variable.name: variable for variable in program.variables}
        self.values: dict[str, Tensor] = {}  # fake, of the results of calls so far
        self.functions: dict[object, Function] = {}

    def call(self, joined: Joined) -> tuple[Call, Function]:
        """Return the call that replaces a call and its writes, and its function."""
        call, function = joined.call, self.program.function(joined.call.function)
        for name, node in zip(call.results, graph_outputs(function.graph), strict=True):
            if name is not None:
                self.values[name] = node.meta["val"]
        if not joined.writes:
            return call, function
        further = self.further(joined.writes, (*call.arguments, *call.results))
        names = (*call.arguments, *further)
        signature = function.name, joined.kept, _signature(joined.writes, names, call.results)
        layouts = tuple(self.layout(name, joined.writes) for name in further)
        key = *signature, tuple((value.shape, value.stride(), value.dtype) for value in layouts)
        if key not in self.functions:
            layout_of = dict(zip(further, layouts, strict=True))
            self.functions[key] = _built(function, joined, layout_of)
        results = tuple(call.results[position] for position in joined.kept)
        return replace(call, arguments=names, results=results), self.functions[key]

    def call_that_writes(self, joined: Joined) -> tuple[Call, Function]:
        """Return a call after another one that writes buffers and computes nothing."""
        names = self.further(joined.separate, ())
        layouts = {name: self.layout(name, joined.separate) for name in names}
        empty = fx.Graph()
        empty.output(()).meta["val"] = None
        function = make_function(f"{joined.call.function}_writes", module_of(empty))
        (write,) = (i for i in joined.instructions.values() if isinstance(i, WriteBuffer))
        call = replace(
            joined.call, function=function.name, arguments=(), results=(), source=write.source
        )
        writing = replace(joined, call=call, writes=joined.separate, kept=(), separate=())
        return replace(call, arguments=names), _built(function, writing, layouts)

    def further(self, writes: Sequence[Write], own: Sequence[str | None]) -> tuple[str, ...]:
        """Return further values that writes need, besides a call's own, in order of first use."""
        names = [n for w in writes for n in (w.target, w.value, w.weight) if n is not None]
        return tuple(name for name in dict.fromkeys(names) if name not in own)

    def layout(self, name: str, writes: Sequence[Write]) -> Tensor:
        """A fake tensor for an argument that the function has not had so far."""
        if name in self.values:
            return self.values[name]
        like = next(self.values[w.value] for w in writes if name in (w.target, w.weight))
        variable = self.variables.get(name)
        with fake_mode_of([like]):
            if variable is None:
                return torch.empty((), dtype=torch.float32, device=like.device)
            return _empty(variable, like.device)


def _empty(variable: Variable, device: torch.device) -> Tensor:
    type_ = variable.type
    if variable.strides is None:
        return torch.empty(type_.shape, dtype=type_.dtype, device=device)
    return torch.empty_strided(type_.shape, variable.strides, dtype=type_.dtype, device=device)


def _signature(
    writes: Sequence[Write], names: Sequence[str], results: Sequence[str | None]
) -> tuple[object, ...]:
    """Return a key that is equal for equal writes, regardless of names."""

    def place(name: str | None) -> tuple[str, int] | None:
        if name is None:
            return None
        return ("result", results.index(name)) if name in results else ("input", names.index(name))

    return tuple((place(w.target), place(w.value), w.rule, place(w.weight)) for w in writes)


def _built(function: Function, joined: Joined, further: Mapping[str, Tensor]) -> Function:
    """The function that writes.

    Args:
        further: values of the arguments that it has not had so far.
    """
    module = copy_of(function.graph)
    graph = module.graph
    output = graph.output_node()
    results = graph_outputs(module)
    inputs = list(graph.find_nodes(op="placeholder"))
    nodes: dict[str | None, fx.Node] = dict(zip(joined.call.arguments, inputs, strict=True))
    for name, value in further.items():
        nodes[name] = new_input(graph, name, inputs[-1] if inputs else None)
        nodes[name].meta["val"] = value
        inputs.append(nodes[name])
    nodes |= zip(joined.call.results, results, strict=True)
    writes = [
        GraphWrite(nodes[w.target], nodes[w.value], w.rule, nodes[w.weight] if w.weight else None)
        for w in joined.writes
    ]
    add_writes(graph, writes)
    output.args = (tuple(results[position] for position in joined.kept),)
    drop_own_memory(graph)
    graph.lint()
    module.recompile()
    return make_function(function.name, module)


class InlineWrites(Pass):
    """The pass."""

    level = "program"
    needed = "only functions that write are run"

    def __call__(self, program: Program) -> HostProgram:
        return HostProgram(program, inline(program))


def inline(program: Program) -> Program:
    """`program` with functions that write, instead of instructions that do."""
    joined = plan(program)
    if not any(one.instructions for one in joined):
        return program
    writer = _Writer(program)
    calls: dict[int, list[tuple[Call, Function]]] = {}
    for one in joined:
        calls[one.number] = [writer.call(one)]
        if one.separate:
            calls[one.number].append(writer.call_that_writes(one))
    return with_functions(program, calls, [n for one in joined for n in one.instructions])
