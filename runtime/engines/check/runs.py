"""Run a graph operator by operator, as it is or with changes that a right computation may make.

The judge asks for these runs if a compiled result differs by more than a few units in the last
place. A program's own results never come from them.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.control_flow import bound
from ipu_dynamo.ops.graph_queries import owner, written_arguments
from ipu_dynamo.program import Function, graph_outputs
from ipu_dynamo.runtime.engines.check.classes import CASTS, name_of, rounds, tensors_in
from ipu_dynamo.runtime.engines.check.copies import copies_of
from ipu_dynamo.runtime.engines.check.judge import slices_of
from ipu_dynamo.runtime.engines.check.roundings import Roundings
from ipu_dynamo.runtime.engines.eager_code import has_unsure_layout
from ipu_dynamo.runtime.engines.layouts import with_layout
from ipu_dynamo.runtime.engines.stage import Stage

Call = Callable[..., Any]
Hook = Callable[[fx.Node, Call, Sequence[Any], dict[str, Any]], Any]
_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_SCATTERS = frozenset({"scatter", "index_copy", "index_put", "_index_put_impl"})
_TIES = {"sort": -1, "topk": -1, "kthvalue": -1, "median": -1, "mode": -1, "msort": 0}


class Runs:
    """Further runs of a function on the arguments of one call.

    Args:
        arguments: as they were before the call; they are not changed.
        random_state: that of PyTorch's generator before the call; None: it draws nothing.
    """

    def __init__(
        self, function: Function, arguments: Sequence[Tensor], random_state: Tensor | None
    ) -> None:
        self._function, self._arguments = function, arguments
        self._random_state = random_state
        self._draws: dict[fx.Node, list[Any]] | None = None

    def moved(self, number: int, places: Container[int]) -> list[Any]:
        """The results of a moved run in some places; runs of one number are equal."""
        roundings, drawn = Roundings(number), self._drawn()

        def run(node: fx.Node, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if not self._draws or node not in self._draws:
                return roundings.call(call, args, kwargs)
            made = drawn(node, call, args, kwargs)
            if rounds(node):
                roundings.move(tensors_in(made))
            return made

        arguments = self._copies()
        roundings.move(arguments)
        return self._run(run, arguments, places)

    def wide(self, places: Container[int]) -> list[Any] | None:
        """The results of some places in float64, where all operators take that."""
        drawn = self._drawn()

        def run(node: fx.Node, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            name = name_of(node)
            if name in ("view", "view_copy") and isinstance(args[1], torch.dtype):
                raise TypeError("a view of bits")
            if name in ("_softmax", "_log_softmax"):
                args = (*args[:2], False)
            args, kwargs = map_aggregate((tuple(args), kwargs), _wide_type)
            made = drawn(node, call, args, kwargs)
            return made if written_arguments(node) else map_aggregate(made, _wide)

        arguments = [_wide(tensor) for tensor in self._copies()]
        try:
            return self._run(run, arguments, places)
        except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
            return None

    def undefined(self) -> set[int]:
        """Return the results that PyTorch leaves open for these values.

        Examples are a cast of a number that fits no integer, one of several values written to one
        place, and the order of equal values.
        """
        graph = self._function.graph.graph
        if not _some_may_leave_open(graph):
            return set()
        found: set[fx.Node] = set()

        def run(node: fx.Node, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            before, leaves_open = len(found), _leaves_open(node, args, kwargs)
            made = call(*args, **kwargs)
            if leaves_open or (bodies_of(node) and len(found) > before):
                found.add(node)
            return made

        with self._as_before():
            self._run(run, self._copies(), ())
        for node in graph.nodes:
            if any(owner(source) in found for source in node.all_input_nodes):
                found.add(node)
            if node in found:
                found.update(map(owner, written_arguments(node)))
        nodes = (*graph_outputs(self._function.graph), *self._written)
        return {i for i, n in enumerate(nodes) if isinstance(n, fx.Node) and owner(n) in found}

    def _copies(self) -> list[Tensor]:
        return copies_of(self._arguments, range(len(self._arguments))).tensors

    @property
    def _written(self) -> list[fx.Node]:
        placeholders = self._function.graph.graph.find_nodes(op="placeholder")
        return [placeholders[place] for place in self._function.written]

    def _run(self, hook: Hook, arguments: list[Tensor], places: Container[int]) -> list[Any]:
        """The results of some places, and None in the others."""
        graph = self._function.graph
        outputs = len(graph_outputs(graph))
        written = [
            arguments[place] if number in places else None
            for number, place in enumerate(self._function.written, outputs)
        ]
        return [*evaluator(graph.graph, hook, places)(arguments), *written]

    def _drawn(self) -> Hook:
        """Return a hook that runs an operator; one that draws returns its first draws again."""
        if self._draws is None:
            self._draws = {}
            if self._random_state is not None:
                with self._as_before():
                    note = partial(_note, self._draws)
                    self._run(note, self._copies(), ())
        left = {node: deque(values) for node, values in self._draws.items()}

        def run(node: fx.Node, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if node not in left:
                return call(*args, **kwargs)
            made = left[node].popleft() if len(left[node]) > 1 else left[node][0]
            if name_of(node) == "native_dropout":
                rate = args[1]
                mask = made[1]
                return args[0] * mask * (0.0 if rate == 1 else 1 / (1 - rate)), mask
            if written_arguments(node):
                return args[0].copy_(made)
            return map_aggregate(made, lambda v: v.clone() if isinstance(v, Tensor) else v)

        return run

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Draw the numbers of the call again, and leave PyTorch's generator as it is."""
        if self._random_state is None:
            yield
            return
        now = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            yield
        finally:
            torch.set_rng_state(now)


def evaluator(graph: fx.Graph, hook: Hook, places: Container[int] | None = None) -> Stage:
    """Return a callable of a graph that calls `hook` for each operator, also those in its bodies.

    It takes the arguments out of their list. A value ends after its last use.

    Args:
        places: the results that are needed, all by default; the others are None.
    """
    outputs: Any = graph.output_node().args[0]
    results = [
        result if places is None or place in places else None
        for place, result in enumerate(outputs)
    ]
    ends: dict[fx.Node, list[fx.Node]] = {}
    seen: set[Any] = set(results)
    for node in reversed(graph.nodes):
        if node.op != "output":
            last = dict.fromkeys((node, *node.all_input_nodes))
            ends[node] = [value for value in last if value not in seen]
            seen.update(last)

    def run(arguments: list[Tensor]) -> Sequence[Any]:
        values: dict[fx.Node, Any] = {}
        given = deque(arguments)
        arguments.clear()
        for node in graph.nodes:
            if node.op == "output":
                break
            values[node] = _value(node, given, values, hook)
            for value in ends[node]:
                del values[value]
        return [values[result] if isinstance(result, fx.Node) else result for result in results]

    return run


def _value(node: fx.Node, given: deque[Any], values: dict[fx.Node, Any], hook: Hook) -> Any:
    if node.op == "placeholder":
        return given.popleft()
    if node.op == "get_attr":
        found: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found
    args = map_arg(node.args, values.__getitem__)
    kwargs = map_arg(node.kwargs, values.__getitem__)
    call: Any = node.target
    if bodies := bodies_of(node):
        call = bound(node, {b.name: evaluator(b.graph.graph, hook) for b in bodies})
    made = hook(node, call, args, kwargs)
    if has_unsure_layout(node):  # as in the code that runs operator by operator
        made = with_layout(made, tuple(node.meta["val"].stride()))
    return made


def _note(
    draws: dict[fx.Node, list[Any]],
    node: fx.Node,
    call: Call,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    before = torch.get_rng_state()
    made = call(*args, **kwargs)
    if not bodies_of(node) and not torch.equal(before, torch.get_rng_state()):
        kept = map_aggregate(made, lambda v: v.clone() if isinstance(v, Tensor) else v)
        draws.setdefault(node, []).append(kept)
    return made


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _WIDE:
        return value.to(_WIDE[value.dtype])
    return value


def _wide_type(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _some_may_leave_open(graph: fx.Graph) -> bool:
    return any(
        _may_leave_open(node)
        or any(_some_may_leave_open(body.graph.graph) for body in bodies_of(node))
        for node in graph.nodes
    )


def _may_leave_open(node: fx.Node) -> bool:
    """Whether PyTorch leaves the result of an operator open for some values."""
    name = name_of(node)
    if name in CASTS:
        to = _cast_to(node.args, node.kwargs)
        return to is not None and to != torch.bool and not to.is_floating_point | to.is_complex
    if name in _SCATTERS:
        return name in ("scatter", "index_copy") or True not in node.args[3:4]  # else it adds
    return name in _TIES


def _leaves_open(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    name = name_of(node)
    if not _may_leave_open(node):
        return False
    if name in CASTS:
        return _beyond(args[0], _cast_to(args, kwargs))
    if name in _SCATTERS:
        return _repeats(name, args)
    values = args[0].sort(dim=_dim(name, args)).values if args[0].dim() else args[0][None]
    dim = _dim(name, args) if args[0].dim() else 0
    return bool((values.diff(dim=dim) == 0).any()) if values.dtype != torch.bool else True


def _cast_to(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return kwargs.get("dtype", args[1] if len(args) > 1 else None)


def _beyond(x: Tensor, to: torch.dtype) -> bool:
    if not x.dtype.is_floating_point:
        return False
    limits = torch.iinfo(to)
    return not all(
        ((values > limits.min - 1.0) & (values < limits.max + 1.0)).all()
        for values in (part.double() for (part,) in slices_of(x))
    )


def _repeats(name: str, args: Sequence[Any]) -> bool:
    """Whether several values are written to one place."""
    if name == "scatter":
        dim, index = args[1], args[2]
        ordered = index.sort(dim=dim).values if index.dim() else index
        return bool(index.dim() and (ordered.diff(dim=dim) == 0).any())
    if name == "index_copy":
        return bool(args[2].unique().numel() < args[2].numel())
    indices = [i for i in args[1] if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        return False
    places = torch.stack([i.flatten() for i in torch.broadcast_tensors(*indices)])
    sizes = [size for size, i in zip(args[0].shape, args[1], strict=False) if i is not None]
    places = torch.stack([p % size for p, size in zip(places, sizes, strict=True)])
    return bool(places.unique(dim=1).shape[1] < places.shape[1])


def _dim(name: str, args: Sequence[Any]) -> int:
    """The dimension along which an operator orders."""
    place = {"sort": 1, "topk": 2, "kthvalue": 2, "median": 1, "mode": 1}.get(name)
    given = args[place] if place is not None and len(args) > place else _TIES[name]
    return given if isinstance(given, int) and not isinstance(given, bool) else -1
