"""Keep the gradients of each micro-batch apart until its turn to add them.

Before   a micro-batch's call adds its gradients to accumulators, so the next one has to wait for it
After    the call returns its gradients, and whoever ran it adds them when those of the micro-batch
         before are in: micro-batches run side by side, and every sum has the same order
Keeps    what the program computes, for any number of workers to the last bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

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
from ipu_dynamo.runtime.schedule import Schedule, Task
from ipu_dynamo.runtime.steps import sections
from ipu_dynamo.runtime.torch_private import foreach_add_

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Apart:
    """A program whose only call returns its gradients.

    Args:
        program: the same but for that call and its function.
        gradients: names of the gradients.
        accumulators: names of the variables that they are to be added to, aligned.
    """

    program: Program
    gradients: tuple[str, ...]
    accumulators: tuple[str, ...]


def can_keep_apart(program: Program) -> bool:
    """Whether the micro-batches of a step depend on each other only by sums of gradients.

    They run one call on one IPU of one replica, which changes nothing but accumulators and draws
    no number from torch's generator.
    """
    if program.kind != "training" or program.replicas > 1 or program.num_ipus > 1:
        return False
    loop = sections(program).loop
    if sum(isinstance(i, Call) for i in loop) != 1:
        return False
    if not all(isinstance(i, Receive | Call | Send) for i in loop):
        return False
    (call,) = program.calls
    function = _function(program, call)
    if any(torch.Tag.nondeterministic_seeded in _tags(node) for node in function.operators):
        return False
    sums = [variable.name for variable in program.variables if variable.kind == "accumulator"]
    changing = [node for node in function.operators if _changes(node)]
    added = {name for name, _ in _additions(call, function)}
    return bool(added) and len(changing) == len(added) and added <= set(sums)


def _function(program: Program, call: Call) -> Function:
    return next(f for f in program.functions if f.name == call.function)


def _tags(node: fx.Node) -> Sequence[torch.Tag]:
    return getattr(node.target, "tags", ())


def _changes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _additions(call: Call, function: Function) -> list[tuple[str, fx.Node]]:
    """The additions to an input that nobody reads, with the input's name."""
    names = dict(
        zip(function.graph.graph.find_nodes(op="placeholder"), call.arguments, strict=True)
    )
    return [
        (names[node.args[0]], node)
        for node in function.operators
        if node.target is aten.add_.Tensor and node.args[0] in names
        if not node.users and not node.kwargs and len(node.args[0].users) == 1  # type: ignore[union-attr]
    ]


def keep_apart(program: Program) -> Apart:
    """The program with gradients as results; see `can_keep_apart`."""
    (call,) = program.calls
    function = _function(program, call)
    additions = _additions(call, function)
    accumulators = tuple(name for name, _ in additions)
    gradients = tuple(f"{name}.part" for name in accumulators)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in function.graph.graph.nodes:
        if node.op == "output" or any(node is one or node is one.args[0] for _, one in additions):
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results: list[Any] = [
        copies[node] if isinstance(node, fx.Node) else None
        for node in graph_outputs(function.graph)
    ]
    results += [copies[node.args[1]] for _, node in additions]  # type: ignore[index]
    graph.output(tuple(results))
    module = fx.GraphModule(torch.nn.Module(), graph)
    new = replace(
        call,
        arguments=tuple(name for name in call.arguments if name not in accumulators),
        results=(*call.results, *gradients),
    )
    return Apart(
        replace(
            program,
            functions=(make_function(function.name, module),),
            body=_with(program.body, call, new),
        ),
        gradients,
        accumulators,
    )


def _with(body: tuple[Instruction, ...], old: Call, new: Call) -> tuple[Instruction, ...]:
    """`body` with another call."""
    return tuple(
        replace(i, body=_with(i.body, old, new))
        if isinstance(i, Repeat)
        else new
        if i is old
        else i
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
        self._waiting: dict[int, list[Tensor]] = {}

    def take(self, micro_batch: int, values: Sequence[Any]) -> None:
        """Keep what a micro-batch has made."""
        self._waiting[micro_batch] = [values[slot] for slot in self._slots]

    def add(self, task: Task) -> None:
        """Add those of a micro-batch, whose turn it is."""
        foreach_add_(self._accumulators, self._waiting.pop(task.micro_batch))

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._waiting.clear()


def side_by_side(calls: Sequence[Call], *, micro_batches: int, workers: int) -> Schedule:
    """Each worker takes every `workers`-th micro-batch, the whole of it."""
    count = min(workers, micro_batches)
    tasks = tuple(
        tuple(Task(m // count, 0, m) for m in range(worker, micro_batches, count))
        for worker in range(count)
    )
    return Schedule(tuple(calls), tasks, ((),))
