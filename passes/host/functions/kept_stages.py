"""Find forward values that a stage computes again, and what its calls need if it keeps them.

A repeated operator is matched with one of the forward pass by the number of its value. The values
to keep are collected from the backward pass's last call to its first. Each value that it reads is
kept if it was matched, so that nothing before it is needed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import is_view, makes_constant, nbytes, only_looks
from ipu_dynamo.ops.recurrent.pairs import SAVED
from ipu_dynamo.passes.graph.value_numbers import ValueNumbers
from ipu_dynamo.passes.host.functions.random_words import words_of
from ipu_dynamo.program import RECOMPUTED, Call, Function, Program, graph_outputs
from ipu_dynamo.program.schedule.sections import sections

Made = tuple[int, fx.Node]  # the number of a call, and a node of its function
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_SAME_MEMORY = (aten._unsafe_view.default,)  # views that PyTorch does not call so
# Such a layer is another operator here, which may round otherwise: nothing after it is matched.
_GATES = "recurrent layers, whose gates the forward pass does not make"
_CAST, _CONSTANT = "cast", "constant"
_UNMATCHED = "operators without an equal value in the forward pass"


@dataclass(frozen=True, slots=True)
class RemainingCall:
    """The rest of a call that repeated operators and takes kept values.

    Args:
        taken: its nodes that are kept values now: by node, the value's number.
        live: its other nodes that are still there.
        results: positions of its results that are.
    """

    taken: Mapping[fx.Node, int]
    live: frozenset[fx.Node]
    results: tuple[int, ...]

    @property
    def computes(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.results) or any(node.op == "call_function" for node in self.live)


@dataclass(frozen=True, slots=True)
class KeptStage:
    """A stage that computes values again, and those that it can keep.

    Args:
        copies: of how many micro-batches they are kept at once.
        values: the forward value of each number.
        rewritten: the calls that repeat operators, by number.
        unread: names of forward results that nothing reads any more.
        saved: how many operators are no longer repeated, views aside.
        repeated: the number of operators that still are, by kind.
    """

    stage: int
    copies: int
    values: Mapping[int, Made]
    rewritten: Mapping[int, RemainingCall]
    unread: frozenset[str]
    saved: int
    repeated: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the values of one micro-batch."""
        return sum(nbytes(node) for _, node in self.values.values())


def plan(program: Program, streams: Mapping[str, Sequence[int]]) -> list[KeptStage]:
    """The stages that compute values again, views aside. Reads the program only.

    Args:
        streams: the numbers of random streams in constants, by name.
    """
    again = {function.name for function in program.functions if function.repetitions}
    stages = sorted({call.stage for call in program.calls if call.function in again})
    if not stages or program.kind != "training":
        return []
    numbered = _Numbered(program, streams)
    copies = {stash.stage: stash.copies for stash in program.stash}
    micro_batches = sections(program).micro_batches
    return [
        _plan_stage(numbered, stage, min(copies.get(stage, 1), micro_batches)) for stage in stages
    ]


def _again(node: fx.Node) -> bool:
    return bool(node.meta.get(RECOMPUTED))


class _Numbered:
    """A program whose values have numbers.

    Attributes:
        calls: by number.
        nodes: of each call, the numbers of its function's nodes.
        made: the nodes that are results of calls, by name.
        values: numbers of values, by name.
        forward: forward values, by stage and number.
    """

    def __init__(self, program: Program, streams: Mapping[str, Sequence[int]]) -> None:
        self.program, self.calls = program, program.numbered_calls()
        self._streams = streams
        self.functions = {function.name: function for function in program.functions}
        self.nodes: dict[int, dict[fx.Node, int]] = {}
        self.made: dict[str, Made] = {}
        self.values: dict[str, int] = {}
        self.forward: dict[tuple[int, int], Made] = {}
        self._numbers, self._writes = ValueNumbers(), Counter[str]()
        self._changing = {n for i in sections(program).loop for n in i.written_names}
        for call in self.calls.values():
            self._changing.update(call.arguments[i] for i in self.function(call).written)
        for number, instruction in enumerate(program.walk()):
            if isinstance(instruction, Call):
                self._call(number, instruction)
            for move in instruction.moves:
                if move.reads and move.makes and move.value not in self._changing:
                    self.values[move.result] = self.value(move.value)

    def function(self, call: Call) -> Function:
        return self.functions[call.function]

    def value(self, name: str) -> int:
        """The number of a value, or of a variable that no micro-batch writes."""
        return self.values.setdefault(name, self._numbers.of(("name", name)))

    def _call(self, number: int, call: Call) -> None:
        function, forward = self.function(call), call.direction == "forward"
        inputs = [self._input(name, call, forward) for name in call.arguments]
        graph = function.graph.graph
        pairs = zip(graph.find_nodes(op="placeholder"), call.arguments, strict=True)
        streams = {node: self._streams[name] for node, name in pairs if name in self._streams}
        words = words_of(graph, streams)
        nodes = self.nodes[number] = self._numbers.of_nodes(graph, inputs, words)
        self._writes.update(call.arguments[i] for i in function.written)
        for name, node in zip(call.results, graph_outputs(function.graph), strict=True):
            if name is not None:
                self.made[name], self.values[name] = (number, node), nodes[node]
        if forward:
            for node in function.operators:
                self.forward.setdefault((call.stage, nodes[node]), (number, node))

    def _input(self, name: str, call: Call, forward: bool) -> int:
        """The number of an argument. Before the backward pass of a micro-batch, the forward passes
        of others may write a variable."""
        if name not in self._changing:
            return self.value(name)
        if not forward:
            return self._numbers.new()
        return self._numbers.of(("variable", name, self._writes[name], call.stage_pass))


def _plan_stage(numbered: _Numbered, stage: int, copies: int) -> KeptStage:
    """Find the needs of a stage's backward pass, from its last call to its first one."""
    own = {n: c for n, c in numbered.calls.items() if c.stage == stage and c.direction != "forward"}
    instructions = list(numbered.program.walk())
    others = (i for number, i in enumerate(instructions) if number not in own)
    needed = {name for instruction in others for name in instruction.read_names}
    rewritten: dict[int, RemainingCall] = {}
    saved, repeated = 0, Counter[str]()
    for number in sorted(own, reverse=True):
        call, function = own[number], numbered.function(own[number])
        one = rewritten[number] = _rewritten(numbered, number, needed)
        placeholders = function.graph.graph.find_nodes(op="placeholder")
        needed |= {n for n, p in zip(call.arguments, placeholders, strict=True) if p in one.live}
        for node in filter(_again, function.operators):
            if only_looks(node):
                continue
            if node not in one.live:
                saved += 1
            elif (kind := _kind_of(node)) is not None:
                repeated[kind] += 1
    numbers = {number for one in rewritten.values() for number in one.taken.values()}
    values = {number: numbered.forward[stage, number] for number in sorted(numbers)}
    read = {name for instruction in instructions for name in instruction.read_names}
    return KeptStage(
        stage, copies, values, rewritten, frozenset(read - needed), saved, dict(repeated)
    )


def _rewritten(numbered: _Numbered, number: int, needed: set[str]) -> RemainingCall:
    """Return the rest of a call if it takes kept values.

    Args:
        needed: names of values that are read after it.
    """
    call, numbers = numbered.calls[number], numbered.nodes[number]
    function = numbered.function(call)
    outputs = graph_outputs(function.graph)
    names = dict(
        zip(function.graph.graph.find_nodes(op="placeholder"), call.arguments, strict=True)
    )

    def is_kept(node: fx.Node) -> bool:
        maker = node
        if node.op == "placeholder":
            _, maker = numbered.made.get(names[node], (0, node))
        matched = (call.stage, numbers[node]) in numbered.forward
        kept = isinstance(maker.meta["val"], Tensor) and _kind_of(maker) is _UNMATCHED
        return _again(maker) and matched and kept

    results = tuple(
        place
        for place, (name, node) in enumerate(zip(call.results, outputs, strict=True))
        if name is None or name in needed or not _again(node)
    )
    pending = [outputs[place] for place in results if outputs[place] is not None]
    pending += [node for node in function.operators if not _again(node)]
    live, taken = set[fx.Node](), dict[fx.Node, int]()
    while pending:
        node = pending.pop()
        if node in live or node in taken:
            continue
        if is_kept(node):
            taken[node] = numbers[node]
        else:
            live.add(node)
            pending += node.all_input_nodes
    in_order = {node: taken[node] for node in function.graph.graph.nodes if node in taken}
    return RemainingCall(in_order, frozenset(live), results)


def _kind_of(node: fx.Node) -> str | None:
    """Name a repeated operator for a decision; None: a view.

    `_UNMATCHED` is kept where the forward pass has it.
    """
    if is_view(node) or node.target in _SAME_MEMORY:
        return None
    if makes_constant(node):
        return _CONSTANT
    if node.target in SAVED:
        return _GATES
    if node.target in _CASTS and nbytes(node) >= nbytes(node.all_input_nodes[0]):
        return _CAST
    return _UNMATCHED
