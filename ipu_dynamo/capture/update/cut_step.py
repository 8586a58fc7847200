"""Cut a lowered step into what numbers alone decide, and one function for each parameter.

Before   one graph of all parameters, gradients, states and numbers
After    @factors(lr, beta, step) -> (factors, next step, whether the trace holds);
         @piece(weight, gradient, states, factors) -> (weight, states), once for equal parameters
Keeps    what every result is. What hangs on the tensors of several parameters cannot be cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.capture.update.lower_step import Lowered, alike_counters, depends_on
from ipu_dynamo.capture.update.trace_step import HOST, UntraceableUpdate
from ipu_dynamo.capture.update.world import Leaf, World
from ipu_dynamo.program.ir.function import Function, make_function
from ipu_dynamo.program.ir.traced_update import Counter, TracedStep
from ipu_dynamo.program.ir.types import TensorType

aten = torch.ops.aten
EPOCH = "update.epoch"  # how often the step has changed what the optimiser keeps


@dataclass(frozen=True)
class Plan:
    """What all variants of a step have in common.

    Args:
        states: paths of each parameter's states, with their names and types.
        counters: paths of the numbers that steps change, and the counters for them.
        epochs: how many variants there are before the last one.
        hyperparameters: paths of the numbers that no step changes, only the user.
    """

    states: tuple[tuple[tuple[str, str, TensorType], ...], ...]
    counters: Mapping[str, Counter]
    epochs: int
    hyperparameters: tuple[str, ...]


def plan(last: Lowered, epochs: int, first: World) -> Plan:
    """What is a counter, and what a state, from the step that has all of them.

    Args:
        first: what there is before the first step.

    Raises:
        UntraceableUpdate: something is kept that is neither.
    """
    world, inputs = last.traced.world, last.inputs
    numbers = {path for path, leaf in inputs.items() if leaf.is_number or world.is_known(leaf)}
    while True:  # what hangs on tensors is no counter, and neither is what hangs on that
        sources = {last.leaves[path] for path in inputs.keys() - numbers}
        hangs = depends_on(last.graph, {*last.parameters, *last.gradients, *sources})
        wrong = {p for p in numbers if isinstance(n := last.after.get(p), fx.Node) and hangs[n]}
        if not wrong:
            break
        numbers -= wrong
    for path in inputs.keys() - numbers:
        leaf = inputs[path]
        if leaf.is_number or leaf.parameter is None:
            raise UntraceableUpdate(
                f"{path} of the optimizer hangs on gradients, and belongs to no parameter",
                hint=HOST,
            )
    known = {leaf.path: leaf for leaf in first.leaves}
    counters, hyperparameters = {}, []
    for path, leaf in inputs.items():
        changed = last.after.get(path) is not last.leaves[path]
        if path in numbers and (changed or leaf.parameter is not None or path not in known):
            counters[path] = _counter(leaf, world.names)
        elif path in numbers:
            hyperparameters.append(path)
    for paths in alike_counters(world):
        own = [path for path in paths if path in counters]
        if len({last.after[path] for path in own}) == 1:
            leaf = inputs[own[0]]
            shared = _counter(replace(leaf, parameter=None), world.names)
            counters |= dict.fromkeys(own, shared)
    counters = {path: _beginning(c, known.get(path)) for path, c in counters.items()}
    states = tuple(
        tuple(
            (path, leaf.key, TensorType.of(leaf.value))
            for path, leaf in inputs.items()
            if leaf.parameter == number and path not in numbers
        )
        for number in range(len(world.parameters))
    )
    return Plan(states, counters, epochs, tuple(hyperparameters))


def _counter(leaf: Any, names: Sequence[str]) -> Counter:
    owner = "optimizer" if leaf.group is None else f"group{leaf.group}"
    if leaf.parameter is not None:
        owner = names[leaf.parameter]
    value = leaf.value.item() if leaf.is_tensor else leaf.value
    dtype = torch.float64 if type(leaf.value) is float else torch.int64
    if leaf.is_tensor:
        dtype = leaf.value.dtype
    return Counter(f"{owner}.{leaf.key}", TensorType(dtype, ()), value)


def _beginning(counter: Counter, leaf: Leaf | None) -> Counter:
    """A counter with the value that it has before the first step; 0 where it is not there yet."""
    if leaf is None:
        return replace(counter, initial=0)
    return replace(counter, initial=leaf.value.item() if leaf.is_tensor else leaf.value)


def cut(step: Lowered, common: Plan, epoch: int) -> TracedStep:
    """The functions of a step.

    Args:
        epoch: which of the variants it is.

    Raises:
        UntraceableUpdate: parameters are updated by each other's tensors.
    """
    return _Cutter(step, common, epoch).cut()


class _Cutter:
    def __init__(self, step: Lowered, common: Plan, epoch: int) -> None:
        self.step, self.common, self.epoch = step, common, epoch
        self.world, self.inputs = step.traced.world, step.inputs
        self.name = type(self.world.optimizer).__name__.lower()
        self.owner: dict[fx.Node, int] = {}
        for place, (p, g) in enumerate(zip(step.parameters, step.gradients, strict=True)):
            self.owner[p] = self.owner[g] = place
        for path, leaf in self.inputs.items():
            if leaf.parameter is not None and path not in common.counters:
                self.owner[step.leaves[path]] = leaf.parameter
        self.hangs = depends_on(step.graph, self.owner)

    def cut(self) -> TracedStep:
        pieces: dict[str, Function] = {}
        by_key: dict[str, str] = {}
        functions, arguments, elementwise = {}, {}, set()
        crossing: dict[fx.Node, str] = {}
        hyperparameters = self.hyperparameters()
        for place, name in enumerate(self.world.names):
            function, numbers, is_elementwise = self.piece(place)
            if function.key not in by_key:
                by_key[function.key] = f"{self.name}_{function.key[:8]}"
                pieces[by_key[function.key]] = make_function(by_key[function.key], function.graph)
            for node in numbers:
                crossing.setdefault(node, f"update.factor{len(crossing)}")
            arguments[name] = tuple(crossing[node] for node in numbers)
            if is_elementwise:
                elementwise.add(by_key[function.key])
            functions[name] = by_key[function.key]
        states = {
            name: tuple((key, type_) for _, key, type_ in self.common.states[place])
            for place, name in enumerate(self.world.names)
        }
        return TracedStep(
            self.factors(hyperparameters, crossing),
            tuple(pair for pair, _ in hyperparameters),
            self.counters(),
            tuple(crossing.values()),
            pieces,
            functions,
            states,
            arguments,
            frozenset(elementwise),
            once=self.epoch < self.common.epochs,
        )

    def hyperparameters(self) -> list[tuple[tuple[int, str], fx.Node]]:
        """Numbers that a step only reads: their group and name, and their placeholder."""
        return [
            ((leaf.group or 0, leaf.key), self.step.leaves[path])
            for path, leaf in self.inputs.items()
            if path in self.common.hyperparameters
        ]

    def counters(self) -> tuple[Counter, ...]:
        found = list(self.distinct().values())
        if self.common.epochs:
            found.append(Counter(EPOCH, TensorType(torch.int64, ()), 0))
        return tuple(found)

    def distinct(self) -> dict[str, Counter]:
        """The counters, each under the first path of those that share it.

        Raises:
            UntraceableUpdate: this variant counts differently for parameters that share one.
        """
        found: dict[str, tuple[str, Counter]] = {}
        for path, counter in self.common.counters.items():
            first, _ = found.setdefault(counter.name, (path, counter))
            if self.step.after.get(path) != self.step.after.get(first):
                raise UntraceableUpdate(
                    f"{path} and {first} of the optimizer count alike, but not at the first step",
                    hint=HOST,
                )
        return dict(found.values())

    def piece(self, place: int) -> tuple[Function, list[fx.Node], bool]:
        """The function of one parameter, the numbers that it takes, and whether it computes
        element by element."""
        step, states = self.step, self.common.states[place]
        results = [step.weights[place], *(step.after.get(path) for path, _, _ in states)]
        needed = _needed([node for node in results if isinstance(node, fx.Node)])
        for node in (n for n in step.graph.nodes if n in needed):
            others = {self.owner[one] for one in self.hangs[node]} - {place}
            if others:
                first, second = self.world.names[place], self.world.names[min(others)]
                raise UntraceableUpdate(
                    f"the optimizer updates {first} by what hangs on {second}, too: {node.target}",
                    hint=f"clip with compile_training(clip=...), if that is the reason, or: {HOST}",
                )
        own = [n for n in step.graph.nodes if n in needed and (self.hangs[n] or not _is_number(n))]
        inside = set(own)
        taken = [n for node in own for n in node.all_input_nodes if n not in inside]
        taken += [n for n in results if isinstance(n, fx.Node) and n not in inside]
        numbers = list(dict.fromkeys(taken))
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs = [
            ("weight", step.parameters[place]),
            ("gradient", step.gradients[place]),
            *((f"state{i}", step.leaves.get(path)) for i, (path, _, _) in enumerate(states)),
            *((f"factor{i}", node) for i, node in enumerate(numbers)),
        ]
        types = {f"state{i}": type_ for i, (_, _, type_) in enumerate(states)}
        for name, node in inputs:
            placeholder = graph.placeholder(name)
            if node is None:  # a state that does not exist yet
                with fake_mode_of([step.parameters[place].meta["val"]]):
                    placeholder.meta["val"] = torch.empty(
                        types[name].shape, dtype=types[name].dtype
                    )
                continue
            placeholder.meta["val"] = node.meta["val"]
            copies[node] = placeholder
        for node in own:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        made = [copies[node] if isinstance(node, fx.Node) else node for node in results]
        graph.output(_owned(graph, made))
        shape = step.parameters[place].meta["val"].shape
        is_elementwise = all(
            _is_elementwise(node, shape) for node in own if node.op == "call_function"
        )
        is_elementwise &= all(type_.shape == tuple(shape) for _, _, type_ in states)
        gm = fx.GraphModule(torch.nn.Module(), graph)
        return make_function("piece", gm), numbers, is_elementwise

    def factors(
        self,
        hyperparameters: Sequence[tuple[tuple[int, str], fx.Node]],
        crossing: Mapping[fx.Node, str],
    ) -> Function:
        """The function of numbers."""
        step, graph, copies = self.step, fx.Graph(), dict[fx.Node, fx.Node]()
        like = step.parameters[0].meta["val"]
        for (group, name), node in hyperparameters:
            placeholder = graph.placeholder(f"group{group}_{name}".replace(".", "_"))
            placeholder.meta["val"] = node.meta["val"]
            copies[node] = placeholder
        counters = []
        counters_of = self.distinct()
        for path, counter in counters_of.items():
            placeholder = graph.placeholder(counter.name.replace(".", "_"))
            with fake_mode_of([like]):
                placeholder.meta["val"] = torch.empty((), dtype=counter.type.dtype)
            counters.append(placeholder)
            if path in step.leaves:
                copies[step.leaves[path]] = placeholder
        epoch = None
        if self.common.epochs:
            epoch = graph.placeholder(EPOCH.replace(".", "_"))
            with fake_mode_of([like]):
                epoch.meta["val"] = torch.empty((), dtype=torch.int64)
        after = [step.after.get(path) for path in counters_of]
        conditions = [node for node, _ in self.conditions()]
        wanted = [*crossing, *(n for n in after if isinstance(n, fx.Node)), *conditions]
        needed = _needed(wanted)
        for node in step.graph.nodes:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        results: list[fx.Node] = [copies[node] for node in crossing]
        for value, placeholder in zip(after, counters, strict=True):
            results.append(self.next_counter(graph, value, placeholder, copies))
        holds = [copies[node] for node in conditions]
        if epoch is not None:
            last = self.common.epochs
            results.append(_full(graph, min(self.epoch + 1, last), epoch))
            compare = aten.ge.Scalar if self.epoch == last else aten.eq.Scalar
            holds.append(_call(graph, compare, epoch, self.epoch))
        results.append(_all(graph, holds, like))
        graph.output(_owned(graph, results))
        function = make_function("factors", fx.GraphModule(torch.nn.Module(), graph))
        return make_function(f"{self.name}_factors_{function.key[:8]}", function.graph)

    def next_counter(
        self, graph: fx.Graph, value: Any, counter: fx.Node, copies: Mapping[fx.Node, fx.Node]
    ) -> fx.Node:
        if isinstance(value, fx.Node):
            made = copies[value]
            if made.meta["val"].dtype != counter.meta["val"].dtype:
                made = _call(graph, aten._to_copy.default, made, dtype=counter.meta["val"].dtype)
            return made
        if value is None:  # it is not there yet
            return counter
        return _full(graph, value, counter)

    def conditions(self) -> list[tuple[fx.Node, str]]:
        """The conditions on numbers. What else was noted has decided nothing in Python: these are
        ranges of values that nobody knew."""
        kept, known = (
            [],
            {
                self.step.leaves[path]
                for path, leaf in self.inputs.items()
                if self.world.is_known(leaf) and path not in self.common.counters
            },
        )
        for node, line in self.step.conditions:
            if not self.hangs[node]:
                kept.append((node, line))
            elif self.hangs[node] & known:
                raise UntraceableUpdate(
                    "the optimizer decides in Python by a value that hangs on gradients",
                    where=line,
                    hint=HOST,
                )
        return kept


def _needed(results: Sequence[fx.Node]) -> set[fx.Node]:
    pending, found = list(results), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 0


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    node.meta["val"] = target(*values, **kwargs)
    return node


def _full(graph: fx.Graph, value: float, like: fx.Node) -> fx.Node:
    return _call(graph, aten.full_like.default, like, value)


def _all(graph: fx.Graph, conditions: Sequence[fx.Node], like: Tensor) -> fx.Node:
    if not conditions:
        node = graph.call_function(aten.ones.default, ([],), {"dtype": torch.bool})
        with fake_mode_of([like]):
            node.meta["val"] = torch.ones([], dtype=torch.bool)
        return node
    total, *others = conditions
    for other in others:
        total = _call(graph, aten.logical_and.default, total, other)
    return total


def _owned(graph: fx.Graph, results: Sequence[Any]) -> tuple[fx.Node, ...]:
    """Results of which none shares memory with an argument or another one."""
    found: list[fx.Node] = []
    for node in results:
        if not isinstance(node, fx.Node):
            raise UntraceableUpdate(
                f"the optimizer puts {node!r} in the place of a state", hint=HOST
            )
        alone = node.op == "call_function" and not _is_view(node) and node not in found
        found.append(node if alone else _call(graph, aten.clone.default, node))
    return tuple(found)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        arg.alias_info is not None and not arg.alias_info.is_write for arg in schema.arguments
    )


def _is_elementwise(node: fx.Node, shape: torch.Size) -> bool:
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    copies = node.target in (aten._to_copy.default, aten.clone.default, aten.full_like.default,
                             aten.zeros_like.default, aten.ones_like.default, aten.detach.default,
                             aten.alias.default, aten.empty_like.default)  # fmt: skip
    value = node.meta.get("val")
    return (pointwise or copies) and isinstance(value, Tensor) and value.shape == shape
