"""Keep the gradients of each micro-batch apart until its turn to add them.

Before   a micro-batch's calls add its gradients to accumulators, so the next one has to wait
After    the calls return its gradients, and whoever ran them adds them when those of the
         micro-batch before are in: micro-batches run side by side, and sums have the same order
Keeps    what the program computes, for any number of workers to the last bit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.accumulate import accumulate_product, accumulate_rows
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.ops.private.native import foreach_add_
from ipu_dynamo.program import (
    Call,
    Function,
    Instruction,
    Program,
    Receive,
    Repeat,
    Send,
    graph_outputs,
    make_function,
)
from ipu_dynamo.program.schedule.planning import draws
from ipu_dynamo.program.schedule.schedule import Schedule, Task
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import stage_passes

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Apart:
    """A program whose calls return their gradients.

    Args:
        program: the same but for calls and functions.
        gradients: names of the gradients.
        accumulators: names of the variables that they are to be added to, aligned.
    """

    program: Program
    gradients: tuple[str, ...]
    accumulators: tuple[str, ...]


def why_not_deferred(program: Program) -> str | None:
    """What keeps the micro-batches of a step from running side by side, in words; None: nothing,
    as they depend on each other by sums of gradients only.

    They have to run one stage on one IPU of one replica, which changes nothing but accumulators,
    and draws no number from torch's generator.
    """
    if program.kind != "training":
        return "nothing is trained"
    if program.replicas > 1:
        return f"{program.replicas} replicas"
    if program.num_ipus > 1:
        return f"{program.num_ipus} IPUs"
    loop = sections(program).loop
    if (count := len(stage_passes(program.calls))) != 1:
        return f"{count} stage passes a micro-batch"
    if not all(isinstance(i, Receive | Call | Send) for i in loop):
        return "variables or values are off the chip"
    if draws(program):
        return "numbers are drawn from torch's generator"
    sums = {variable.name for variable in program.variables if variable.kind == "accumulator"}
    places = {function.name: _places(function) for function in program.functions}
    added = [call.arguments[place] for call in program.calls for place in places[call.function]]
    if not added or not sums.issuperset(added) or not all(map(_only_adds, program.functions)):
        return "micro-batches change other variables than sums of gradients"
    return None


def _only_adds(function: Function) -> bool:
    """Whether all that a function changes are inputs, by additions."""
    return sum(map(writes, function.operators)) == len(_additions(function))


def _additions(function: Function) -> list[fx.Node]:
    """The additions to an input that nobody reads."""
    inputs = set(function.graph.graph.find_nodes(op="placeholder"))
    found = [n for n in function.operators if _adds(n) and n.args[0] in inputs and not n.users]
    only_added = {n.args[0] for n in found} - {
        source
        for node in function.operators
        for position, source in enumerate(node.all_input_nodes)
        if node not in found or position > 0
    }
    return [node for node in found if node.args[0] in only_added]


def _adds(node: fx.Node) -> bool:
    if node.target is accumulate_product:
        return node.args[1] is True
    return node.target is accumulate_rows or (node.target is aten.add_.Tensor and not node.kwargs)


def _places(function: Function) -> list[int]:
    """Which arguments a function adds to, in the order of its additions."""
    inputs = function.graph.graph.find_nodes(op="placeholder")
    place = {node: index for index, node in enumerate(inputs)}
    return [place[node.args[0]] for node in _additions(function)]


def keep_apart(program: Program) -> Apart:
    """The program with gradients as results; see `why_not_deferred`."""
    places = {function.name: _places(function) for function in program.functions}
    accumulators: list[str] = []
    parts: list[str] = []
    calls: dict[int, Call] = {}
    for call in program.calls:
        added = [call.arguments[place] for place in places[call.function]]
        for name in added:
            parts.append(_part(name, accumulators.count(name)))
            accumulators.append(name)
        calls[id(call)] = replace(
            call,
            arguments=tuple(name for name in call.arguments if name not in added),
            results=(*call.results, *parts[len(parts) - len(added) :]),
        )
    return Apart(
        replace(
            program,
            functions=tuple(map(_without_additions, program.functions)),
            body=_with(program.body, calls),
        ),
        tuple(parts),
        tuple(accumulators),
    )


def _part(accumulator: str, number: int) -> str:
    """What one micro-batch adds, the first time or later."""
    return f"{accumulator}.part{number or ''}"


def _without_additions(function: Function) -> Function:
    """A function that returns what it added to inputs, which it has no longer."""
    additions = _additions(function)
    dropped = {*additions, *(node.args[0] for node in additions)}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in function.graph.graph.nodes:
        if node.op != "output" and node not in dropped:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results: list[Any] = [
        copies[node] if isinstance(node, fx.Node) else None
        for node in graph_outputs(function.graph)
    ]
    results += [_added(graph, node, copies) for node in additions]
    graph.output(tuple(results))
    return make_function(function.name, fx.GraphModule(torch.nn.Module(), graph))


def _added(graph: fx.Graph, addition: fx.Node, copies: Mapping[Any, fx.Node]) -> fx.Node:
    """The value that an addition adds."""
    total = addition.args[0]
    assert isinstance(total, fx.Node)
    if addition.target is aten.add_.Tensor:
        return copies[addition.args[1]]
    if addition.target is accumulate_product:
        a, b = addition.args[2:]
        value = graph.call_function(aten.mm.default, (copies[a], copies[b]))
    else:
        _, tokens, rows = addition.args
        count = total.meta["val"].shape[0]
        given = (copies[rows], copies[tokens], count, -1, False)
        value = graph.call_function(aten.embedding_dense_backward.default, given)
    dense = torch.empty_like(total.meta["val"], memory_format=torch.contiguous_format)
    value.meta = addition.meta | {"val": dense}
    return value


def _with(body: tuple[Instruction, ...], calls: Mapping[int, Call]) -> tuple[Instruction, ...]:
    """`body` with other calls, by the identity of its own."""
    return tuple(
        replace(i, body=_with(i.body, calls)) if isinstance(i, Repeat) else calls.get(id(i), i)
        for i in body
    )


class Gradients:
    """The gradients of micro-batches that have run and were not added yet.

    Args:
        apart: what makes them.
        slots: where the values of a micro-batch are, by name.
        tensors: of every variable.
    """

    def __init__(
        self, apart: Apart, slots: Mapping[str, int], tensors: Mapping[str, Tensor]
    ) -> None:
        self._slots = [slots[name] for name in apart.gradients]
        self._accumulators = [tensors[name] for name in apart.accumulators]
        seen: Counter[str] = Counter()
        self._rounds: list[list[int]] = []  # in each an accumulator is written once
        for place, name in enumerate(apart.accumulators):
            if seen[name] == len(self._rounds):
                self._rounds.append([])
            self._rounds[seen[name]].append(place)
            seen[name] += 1
        self._waiting: dict[int, list[Tensor]] = {}

    def take(self, micro_batch: int, values: Sequence[Any]) -> None:
        """Keep what a micro-batch has made."""
        self._waiting[micro_batch] = [values[slot] for slot in self._slots]

    def add(self, task: Task) -> None:
        """Add those of a micro-batch, whose turn it is."""
        parts = self._waiting.pop(task.micro_batch)
        for places in self._rounds:
            foreach_add_([self._accumulators[i] for i in places], [parts[i] for i in places])

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._waiting.clear()


def side_by_side(turn: Call, *, micro_batches: int, workers: int) -> Schedule:
    """Each worker takes every `workers`-th micro-batch, the whole of it."""
    count = min(workers, micro_batches)
    tasks = tuple(
        tuple(Task(m // count, 0, m) for m in range(worker, micro_batches, count))
        for worker in range(count)
    )
    return Schedule((turn,), tasks, ((),))
