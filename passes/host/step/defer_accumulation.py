"""Defer the additions of a micro-batch's gradients until its turn to add them.

Before   a micro-batch's calls add its gradients to accumulators, so the next one has to wait
After    the calls return its gradients, and whoever ran them adds them when those of the
         micro-batch before are in: micro-batches run side by side, and sums have the same order
Keeps    what the program computes, for any number of workers to the last bit.
Source   our own; data parallelism over the micro-batches of one replica.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.accumulate import accumulate_matmul, accumulate_rows
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.ops.operator_costs import BYTES_PER_SECOND
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import (
    Call,
    Decision,
    Function,
    HostProgram,
    Program,
    Receive,
    Send,
    graph_outputs,
    make_function,
)
from ipu_dynamo.program.deferred import Deferred
from ipu_dynamo.program.ir.made_names import made_of
from ipu_dynamo.program.schedule.estimated_times import on_cpu, seconds_of_passes
from ipu_dynamo.program.schedule.planning import draws
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import stage_passes
from ipu_dynamo.tune.costs import PASSES_OF_ADDING, SHARE_OF_ADDING, WORTH_DEFERRING


def why_not_deferred(program: Program) -> str | None:
    """Return why the micro-batches of a step cannot run side by side.

    None: they can, as they depend on each other by sums of gradients only. They have to run one
    stage on one IPU of one replica. This stage changes nothing except accumulators, and draws no
    number from torch's generator.
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
    """Return the additions to an input whose results no operator reads."""
    inputs = set(function.graph.graph.find_nodes(op="placeholder"))
    additions = [n for n in function.operators if _adds(n) and n.args[0] in inputs and not n.users]
    only_added = {n.args[0] for n in additions} - {
        source
        for node in function.operators
        for position, source in enumerate(node.all_input_nodes)
        if node not in additions or position > 0
    }
    return [node for node in additions if node.args[0] in only_added]


def _adds(node: fx.Node) -> bool:
    if node.target is accumulate_matmul:
        return node.args[1] is True
    return node.target is accumulate_rows or (node.target is aten.add_.Tensor and not node.kwargs)


def _places(function: Function) -> list[int]:
    """Return the numbers of the arguments that a function adds to, in order of its additions."""
    inputs = function.graph.graph.find_nodes(op="placeholder")
    place = {node: index for index, node in enumerate(inputs)}
    return [place[node.args[0]] for node in _additions(function)]


def defer(program: Program) -> Deferred:
    """The program with gradients as results; see `why_not_deferred`."""
    places = {function.name: _places(function) for function in program.functions}
    accumulators: list[str] = []
    parts: list[str] = []
    calls: dict[int, list[Call]] = {}
    for number, call in program.numbered_calls().items():
        added = [call.arguments[place] for place in places[call.function]]
        for name in added:
            parts.append(_part(name, accumulators.count(name)))
            accumulators.append(name)
        arguments = tuple(name for name in call.arguments if name not in added)
        results = (*call.results, *parts[len(parts) - len(added) :])
        calls[number] = [replace(call, arguments=arguments, results=results)]
    functions = tuple(map(_without_additions, program.functions))
    return Deferred(
        replace(program.with_instructions(calls), functions=functions),
        tuple(parts),
        tuple(accumulators),
    )


def _part(accumulator: str, number: int) -> str:
    """Name the part that one micro-batch adds, the first time or later."""
    return made_of(accumulator, f"part{number or ''}")


def _without_additions(function: Function) -> Function:
    """Copy a function without its additions to inputs: it returns the terms instead."""
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
    if addition.target is accumulate_matmul:
        a, b = addition.args[2:]
        value = graph.call_function(aten.mm.default, (copies[a], copies[b]))
    else:
        _, tokens, rows = addition.args
        count = total.meta["val"].shape[0]
        arguments = (copies[rows], copies[tokens], count, -1, False)
        value = graph.call_function(aten.embedding_dense_backward.default, arguments)
    dense = torch.empty_like(total.meta["val"], memory_format=torch.contiguous_format)
    value.meta = addition.meta | {"val": dense}
    return value


class DeferAccumulation(Pass):
    """The pass. `forced`: whether to defer, regardless of the gain."""

    level = "host"
    choices = (True, False)

    forced: bool | None = None

    def applies(self, host: HostProgram, contents: Contents) -> bool:
        return host.program.kind == "training"

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        program = host.inlined
        if program.kind != "training" or sections(program).micro_batches == 1:
            return False
        reason = why_not_deferred(program)
        if self.forced and reason is not None:
            raise CompileError(
                f"micro-batches cannot run side by side: {reason}",
                hint="leave side_by_side out; running statistics of a batch norm, for instance, "
                "pass from one micro-batch to the next",
            )
        if self.forced is not None:
            deferred, reason = self.forced, "it is forced"
        elif reason is not None:
            deferred = False
        else:
            deferred, reason = _is_worth_it(program)
        choice = "deferred accumulation" if deferred else "not deferred"
        host = host.deciding(Decision(self.name, choice, reason))
        return replace(host, deferred=defer(program)) if deferred else host


def _is_worth_it(program: Program) -> tuple[bool, str]:
    """Whether threads gain more than deferring costs, and why."""
    if torch.get_num_threads() == 1:
        return False, "PyTorch has one thread"
    if not on_cpu(program):
        return False, "it runs on a device"
    seconds = sum(seconds_of_passes(program))
    held = sum(v.type.nbytes for v in program.variables if v.kind == "accumulator")
    adding = PASSES_OF_ADDING * held / BYTES_PER_SECOND
    figures = f"a micro-batch takes {1e3 * seconds:.1f} ms, adding {1e3 * adding:.1f} ms"
    return seconds >= WORTH_DEFERRING and adding <= SHARE_OF_ADDING * seconds, figures
