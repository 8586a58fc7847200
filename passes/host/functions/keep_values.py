"""Keep forward values for the backward pass, if they are recomputed only to save an IPU's memory.

Before   (%y) = call @forward0(%w, %x);  ...;  (%g) = call @backward0(%w, %x, %dy)
         where backward0 computes %h again, as forward0 does
After    (%y, %h) = call @forward0(%w, %x);  ...;  (%g) = call @backward0(%w, %dy, %h)
Keeps    values, to the last bit on one engine; the Program. A repeated operator is matched by its
         value: by operator, arguments, and the arguments of the calls. Views, casts that
         need no more memory than their results, and constants are still repeated.
Source   PopTorch user guide, pipelined execution: stages recompute because an IPU has little
         memory. Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.builder import new_input
from ipu_dynamo.passes.graph.extract import copied
from ipu_dynamo.passes.host.functions.kept_stages import KeptStage, Made, RemainingCall, plan
from ipu_dynamo.passes.host.functions.rewrite_functions import with_functions
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.program import (
    RECOMPUTED,
    Call,
    Decision,
    Function,
    HostProgram,
    Program,
    graph_outputs,
    make_function,
)
from ipu_dynamo.program.ir.made_names import made_of
from ipu_dynamo.program.ir.types import byte_text, counted
from ipu_dynamo.tune.costs import SHARE_OF_KEPT_VALUES
from ipu_dynamo.tune.installed_memory import installed_bytes


class KeepValues(Pass):
    """The pass.

    Args:
        memory: bytes of a device's memory, as installed; None: those of this machine.
        streams: the numbers of random streams in constants, by name.
        forced: whether to keep values, regardless of memory and of the user's options.
    """

    level = "host"
    choices = (True, False)

    memory: int | None = None
    streams: Mapping[str, Sequence[int]] = field(default_factory=dict)
    forced: bool | None = None

    def applies(self, host: HostProgram, contents: Contents) -> bool:
        return RECOMPUTED in contents.marks

    def __call__(self, host: HostProgram) -> HostProgram | bool:
        program = host.inlined
        stages = plan(program, self.streams)
        if not stages:
            return False
        reasons = _reasons(stages, program, self.memory, self.forced)
        chosen = [stage for stage in stages if stage.stage not in reasons]
        host = host.deciding(*(_decision(s, program, reasons.get(s.stage)) for s in stages))
        return replace(host, inlined=_Keeping(program, chosen).result()) if chosen else host


def _reasons(
    stages: Sequence[KeptStage], program: Program, memory: int | None, forced: bool | None
) -> Mapping[int, str]:
    """Why some stages still compute their values again."""
    if forced is False:
        return {one.stage: "it is forced" for one in stages}
    if forced is None and program.recomputed == "asked":
        return {one.stage: "recomputation was asked for" for one in stages}
    reasons = {one.stage: f"{_repeated(one)} only" for one in stages if not one.values}
    stages = [one for one in stages if one.values]
    if forced:
        return reasons
    if memory is None:
        devices = {n.meta["val"].device for one in stages for _, n in one.values.values()}
        known = [installed_bytes(device) for device in devices]
        if None in known:
            unknown = "the size of the memory is not known"
            return reasons | {one.stage: unknown for one in stages}
        memory = min((size for size in known if size is not None), default=0)
    room = SHARE_OF_KEPT_VALUES * memory
    for one in sorted(stages, key=lambda one: (one.copies * one.nbytes, -one.stage)):
        wanted = program.replicas * one.copies * one.nbytes
        if wanted <= room:
            room -= wanted
        else:
            share = f"{SHARE_OF_KEPT_VALUES:g} of the {byte_text(memory)} installed"
            reasons[one.stage] = f"{_size(one, program)} do not fit into {share}"
    return reasons


def _decision(one: KeptStage, program: Program, against: str | None) -> Decision:
    if against is not None:
        choice, reason = "computed again", against
    else:
        choice = f"kept, {_size(one, program)}"
        are = "is" if one.saved == 1 else "are"
        reason = f"{counted(one.saved, 'operator')} {are} not repeated"
        reason += f"; repeated are {_repeated(one)}" if one.repeated else ""
    of = f"values of stage {one.stage}"
    return Decision(KeepValues.name, choice, reason, of=of, count=len(one.values))


def _repeated(one: KeptStage) -> str:
    """`3 casts, 1 constant`."""
    return ", ".join(counted(count, what) for what, count in one.repeated.items())


def _size(one: KeptStage, program: Program) -> str:
    """`3 x 1.2 MiB`, for each micro-batch that is kept at once."""
    replicas = f"{program.replicas} replicas x " if program.replicas > 1 else ""
    return f"{replicas}{one.copies} x {byte_text(one.nbytes)}"


@dataclass
class _Keeping:
    """A program under construction whose stages keep values.

    Args:
        functions: made so far, by their origin.
        names: of kept values.
    """

    program: Program
    stages: Sequence[KeptStage]
    functions: dict[object, Function] = field(default_factory=dict)
    names: dict[Made, str] = field(default_factory=dict)

    def result(self) -> Program:
        """The program. A function that several calls share is one where they agree."""
        self._name_values()
        unread = {name for one in self.stages for name in one.unread} - {*self.names.values()}
        rewritten = {n: (one, stage) for stage in self.stages for n, one in stage.rewritten.items()}
        new: dict[int, list[tuple[Call, Function]]] = {}
        removed = []
        for number, call in self.program.numbered_calls().items():
            if number not in rewritten:
                new[number] = [self._that_returns(number, call, unread)]
            elif rewritten[number][0].computes:
                new[number] = [self._that_takes(call, *rewritten[number])]
            else:
                removed.append(number)
        return with_functions(self.program, new, removed)

    def _name_values(self) -> None:
        """Give each kept value the name of the result that it is, or a new one."""
        calls = self.program.numbered_calls()
        for number, node in (made for one in self.stages for made in one.values.values()):
            outputs = graph_outputs(self.program.function(calls[number].function).graph)
            new = made_of(node.name, f"kept{len(self.names)}")
            names = dict(zip(outputs, calls[number].results, strict=True))
            self.names[number, node] = names.get(node) or new

    def _that_returns(self, number: int, call: Call, unread: set[str]) -> tuple[Call, Function]:
        """A call that returns the values that are kept of it, and its function."""
        function = self.program.function(call.function)
        places = tuple(i for i, name in enumerate(call.results) if name not in unread)
        kept = {node: name for (of, node), name in self.names.items() if of == number}
        more = tuple(node for node, name in kept.items() if name not in call.results)
        if not more and len(places) == len(call.results):
            return call, function
        key = function.name, places, more
        if key not in self.functions:
            self.functions[key] = _returning(function, places, more)
        results = (*(call.results[i] for i in places), *(kept[node] for node in more))
        return replace(call, results=results), self.functions[key]

    def _that_takes(
        self, call: Call, one: RemainingCall, stage: KeptStage
    ) -> tuple[Call, Function]:
        """A call that takes kept values and repeats only the rest, and its function."""
        function = self.program.function(call.function)
        inputs = function.graph.graph.find_nodes(op="placeholder")
        own = [n for n, node in zip(call.arguments, inputs, strict=True) if node in one.live]
        names = {node: self.names[stage.values[number]] for node, number in one.taken.items()}
        arguments = (*own, *(name for name in dict.fromkeys(names.values()) if name not in own))
        places = {node: arguments.index(name) for node, name in names.items()}
        key = function.name, one.live, one.results, tuple(places.items()), len(own)
        if key not in self.functions:
            self.functions[key] = _taking(function, one, places, len(arguments) - len(own))
        results = tuple(call.results[place] for place in one.results)
        return replace(call, arguments=arguments, results=results), self.functions[key]


def _returning(function: Function, places: Sequence[int], more: Sequence[fx.Node]) -> Function:
    """A function that returns further nodes, and of its own results those at some places."""
    graph, copies = copied(function.graph.graph)
    output, outputs = graph.output_node(), graph_outputs(function.graph)
    nodes = [*(outputs[place] for place in places), *more]
    output.args = (tuple(node if node is None else copies[node] for node in nodes),)
    for node in outputs:
        if node is not None and node.target is aten.clone.default and not copies[node].users:
            graph.erase_node(copies[node])
    return _made(function, graph)


def _taking(
    function: Function, one: RemainingCall, places: Mapping[fx.Node, int], more: int
) -> Function:
    """A function that takes kept values.

    Args:
        places: of the arguments that are in the place of nodes.
        more: how many arguments it has more, after its own that are left.
    """
    graph, copies = copied(function.graph.graph)
    inputs = list(graph.find_nodes(op="placeholder"))
    left = [copies[n] for n in function.graph.graph.find_nodes(op="placeholder") if n in one.live]
    values = {place: node.meta["val"] for node, place in places.items()}
    arguments = [*left]
    for place in range(len(left), len(left) + more):
        last = arguments[-1] if place > len(left) else inputs[-1] if inputs else None
        source = next(node for node, at in places.items() if at == place)
        arguments.append(new_input(graph, f"{source.name}_kept", last))
        arguments[-1].meta["val"] = values[place]
    for node, place in places.items():
        copies[node].replace_all_uses_with(arguments[place])
    outputs = graph_outputs(function.graph)
    kept = tuple(outputs[place] for place in one.results)
    graph.output_node().args = (tuple(node if node is None else copies[node] for node in kept),)
    for node in reversed(function.graph.graph.nodes):
        if node.op != "output" and node not in one.live:
            graph.erase_node(copies[node])
    return _made(function, graph)


def _made(function: Function, graph: fx.Graph) -> Function:
    graph.lint()
    return make_function(function.name, module_of(graph, function.graph))
