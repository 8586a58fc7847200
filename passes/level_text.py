"""Write a model at any level as text, and read it back: what dumps hold and `opt` runs passes on.

    ipu_dynamo joint, form 1
    Joint(ipus=((0, 0),), training=True)
      inputs
        GraphInput(node="primals_1", name="fc.weight", kind="parameter", trainable=True)
      outputs
        GraphOutput(node="t_2", kind="gradient", name="fc.weight")
      graph
        %primals_1: f32[3,8] = placeholder
        %t: f32[8,3]{1,8} = aten.t.default(%primals_1)  {"ipu.stage": 0, "ipu.backward": False}
        ...

Programs have the text of `ipu_dynamo/program/text/`. The other levels use the same mechanism:
dataclasses are records, and only the text that `write_level` writes is read. Parameters and buffers
have no values in a text. A text has neither the structure of the results that the user gets, nor
the tensors from outside the model that a trace read.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeGuard

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ipu_dynamo.capture.capture import (
    BACKWARD,
    MATMUL_NAME,
    NAME,
    NO_STRUCTURE,
    STAGE,
    START,
    WANTED_GRADIENTS,
    Capture,
    LossScale,
    OutputKind,
    OutputRole,
    Placeholder,
    PlaceholderKind,
)
from ipu_dynamo.capture.control_flow.trace_control_flow import ControlFlow, Kind
from ipu_dynamo.capture.private.aot import AOTInput, AOTOutput, TangentAOTInput
from ipu_dynamo.capture.private.tracing import fake_mode, is_fake
from ipu_dynamo.capture.scopes import SCOPE
from ipu_dynamo.ops.bodies import Body, all_bodies
from ipu_dynamo.ops.control_flow import FLOW, control_flow_op, hold_bodies, register_flow
from ipu_dynamo.ops.marks.inner_gradients import HOOK
from ipu_dynamo.ops.marks.markers import autograd_function_op, function_of
from ipu_dynamo.ops.marks.print_tensor import Printing
from ipu_dynamo.ops.operator_costs import ANCHORED
from ipu_dynamo.ops.serialized_loss import CUTS_ROWS
from ipu_dynamo.passes import levels
from ipu_dynamo.passes.aot.annotate_stages import CUSTOM_STAGE
from ipu_dynamo.passes.aot.keep_draws import POLICY
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import STREAM
from ipu_dynamo.passes.joint.schedule_convolution_groups import PARTIALS
from ipu_dynamo.passes.levels import Model, Move, Moves, Part, Partitioned, Pass
from ipu_dynamo.passes.listing import listing
from ipu_dynamo.passes.micro_batch.placements import Piece
from ipu_dynamo.passes.traced.tag_convolution_groups import Member
from ipu_dynamo.program import HostProgram, Input, Output, Overlap, Program
from ipu_dynamo.program.ir.function import body_of
from ipu_dynamo.program.ir.layout import Layout
from ipu_dynamo.program.text.graph_text import GROUP, OWN_MEMORY, RECOMPUTED, GraphForm, opaque
from ipu_dynamo.program.text.indented import LineError
from ipu_dynamo.program.text.literals import write
from ipu_dynamo.program.text.program_text import (
    parse_text,
    read_record,
    record_text,
    write_text,
)
from ipu_dynamo.program.text.records import build

_WINDOW = "ipu.window"  # key of node.meta: a copy that stands for a view
_TAG, _DESCRIBED, _CUSTOM = "partitioner_tag", "desc", "custom"  # keys of meta that are PyTorch's
_MARKS: dict[str, Any] = {  # keys of meta that passes read, with the types of their values
    SCOPE: str,
    NAME: str,
    MATMUL_NAME: str,
    WANTED_GRADIENTS: tuple[str, ...],
    STAGE: int,
    START: bool,
    BACKWARD: bool,
    RECOMPUTED: bool,
    GROUP: str,
    PARTIALS: str,
    OWN_MEMORY: bool,
    STREAM: tuple[int, int],
    CUTS_ROWS: bool,
    ANCHORED: bool,
    _WINDOW: bool,
    _CUSTOM: Mapping[str, int | str | Member],
    _TAG: str,
    "is_gradient_acc": bool,
    POLICY: str,
    _DESCRIBED: AOTInput | tuple[AOTOutput | None, ...],
}
_LARGEST = 1 << 16  # bytes of a constant, beyond which its values are left out
_LARGEST_MEMORY, _ALIGNED = 1 << 40, 16  # bytes of shared memory in a text


@dataclass(frozen=True)
class GraphInput:
    """An input of a graph.

    Args:
        node: its name in the graph.
        name, kind, trainable: as a `Placeholder` has them.
        tensor: the user's own, where that is laid out in another way than the node's value.
        values: of a constant: its elements in memory, in base64; None: they take too much room.
        memory: of tensors that share memory: the number of that memory, its bytes, and the first
            element in it.
    """

    node: str
    name: str
    kind: PlaceholderKind
    trainable: bool = False
    tensor: Layout | None = None
    values: str | None = ""
    memory: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class GraphOutput:
    """An output of a graph: the name of its node, and its role."""

    node: str | None
    kind: OutputKind
    name: str


@dataclass(frozen=True)
class Attribute:
    """A tensor that a graph holds.

    Args:
        target: its name in the graph.
        name: the user's name.
    """

    target: str
    name: str
    tensor: Layout
    values: str | None


@dataclass(frozen=True)
class Hook:
    """The graph that a node calls with a gradient."""

    node: str
    graph: fx.GraphModule


@dataclass(frozen=True, kw_only=True)
class _Graph:
    """The common part of traced and joint graphs; see `Capture`."""

    level: ClassVar[Literal["traced", "joint"]]

    ipus: tuple[tuple[int, int], ...] = ((0, 0),)
    training: bool = False
    keeps_stages: bool = False
    phases: tuple[tuple[int, tuple[int, int]], ...] = ()
    alone: Literal["forward", "backward"] | None = None
    owners: tuple[tuple[str, int], ...] = ()
    aliases: bool = False
    overlaps: tuple[tuple[tuple[str, str], Overlap], ...] = ()
    names: tuple[str, ...] = ()
    anchors: tuple[tuple[str, str], ...] = ()
    prints: tuple[tuple[str, Printing], ...] = ()
    inputs: tuple[GraphInput, ...] = ()
    outputs: tuple[GraphOutput, ...] = ()
    bodies: tuple[Body, ...] = ()
    flows: "tuple[Flow, ...]" = ()
    hooks: tuple[Hook, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    graph: fx.GraphModule


@dataclass(frozen=True, kw_only=True)
class Traced(_Graph):
    """A graph before autograd; `loss` is the name of its node."""

    level: ClassVar[Literal["traced", "joint"]] = "traced"

    loss: str | None = None


@dataclass(frozen=True, kw_only=True)
class Joint(_Graph):
    """A graph after autograd, of both directions or of one."""

    level: ClassVar[Literal["traced", "joint"]] = "joint"

    gradients: tuple[str, ...] = ()
    loss_scale: LossScale | None = None


@dataclass(frozen=True)
class Flow:
    """A loop or a branch before autograd; see `ControlFlow`. Its node has its number."""

    kind: Kind
    carried: int
    scanned: int
    count: int
    where: str
    bodies: tuple[Traced | Joint, ...]


@dataclass(frozen=True, kw_only=True)
class Directions:
    """Forward and backward apart."""

    bodies: tuple[Body, ...] = ()
    forward: fx.GraphModule
    backward: fx.GraphModule


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of stages, and the graph that was cut, with the roles of their inputs."""

    returned: tuple[str, ...]
    changed: tuple[tuple[str, str], ...] = ()
    loads: tuple[tuple[int, tuple[Move, ...]], ...] = ()
    stores: tuple[tuple[int, tuple[Move, ...]], ...] = ()
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    bodies: tuple[Body, ...] = ()
    parts: tuple[Part, ...]
    cut: tuple[Joint, ...]


_RECORDS = {"traced": Traced, "joint": Joint, "directions": Directions, "parts": Parts}


def write_level(model: Model) -> str:
    """A model at any level as text. Python objects in it print as their names."""
    level = levels.level_of(model)
    if isinstance(model, levels.SplitCapture | levels.Update):
        return f"{_first(level)}\n{listing(model)}\n"
    if isinstance(model, levels.BatchPieces):
        return "\n".join([_first(level), *map(_piece, model.pieces)])
    if isinstance(model, HostProgram):
        return "\n".join([*_host_lines(model), ""])
    if isinstance(model, Program):
        return write_text(model)
    return record_text(_record(model), _first(level), _form({}))


def _host_lines(host: HostProgram) -> Iterator[str]:
    """The work of this computer, for people; host passes begin with the program's text."""
    yield str(host.runs)
    for function in host.runs.functions:
        yield f"{function}\n{function.listing()}"
    if host.fused is not None:
        yield f"fused {host.fused.function}\n{host.fused.function.listing()}"
    if host.threads is not None:
        yield f"threads: {host.threads}"
    yield from (f"decision {decision}" for decision in host.decisions)
    for recipe in host.recipes.values():
        yield f"recipe {recipe}"
        if recipe.lowered is not recipe.function:
            yield recipe.lowered.listing()


def parse_level(text: str) -> Model:
    """Inverse of `write_level` for the levels of `_RECORDS` and for programs.

    Raises:
        ValueError: `text` is no model as `write_level` writes it; the line is named.
    """
    first = text.partition("\n")[0]
    if first.startswith("ipu_dynamo program, "):
        return parse_text(text, Program)
    level = next((level for level in _RECORDS if first == _first(level)), None)
    if level is None:
        known = ", ".join(repr(_first(level)) for level in _RECORDS)
        raise LineError(f"line 1: expected one of {known}, or a program, and found {first!r}")
    check = _Check()
    form = _form(check.attributes)
    record = read_record(text, _RECORDS[level], _first(level), check, form)
    if isinstance(record, Directions):
        return levels.Directions(record.forward, record.backward)
    if isinstance(record, Parts):
        cut = check.captures[id(record.cut[0])]
        loads, stores = ({i: [*of] for i, of in m} for m in (record.loads, record.stores))
        return Partitioned(
            record.parts,
            record.returned,
            dict(record.changed),
            cut,
            Moves(loads, stores),
            record.inputs,
            record.outputs,
        )
    return check.captures[id(record)]


def pass_text(step: Pass) -> str:
    """A pass with its options, as `opt` takes it: `Recompute(mode="all")`."""
    return write(step, otherwise=opaque)


def _first(level: str) -> str:
    return f"ipu_dynamo {level}, form 1"


# --- Marks of nodes ------------------------------------------------------------------------------


def _form(attributes: Mapping[str, torch.Tensor]) -> GraphForm:
    """The form of graphs at these levels; all values have one mode."""
    return GraphForm(
        marks=lambda node: dict(_marks(node)),
        meta=_meta,
        of_functions=False,
        arguments=_arguments,
        mode=fake_mode(),
        attributes=attributes,
    )


def _marks(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The entries of a node's meta that passes read."""
    for key in _MARKS:
        value = node.meta.get(key)
        if value is not None and (written := _written(key, value, node)) is not None:
            yield key, written


def _written(key: str, value: Any, node: fx.Node) -> Any:
    """An entry of meta as a text has it; None: other parts of the text say the same.

    Inputs and outputs are described by AOTAutograd or have roles. A described graph has a
    description at its output. In others only the gradients that the graph takes are described.
    """
    described = _DESCRIBED in node.graph.output_node().meta
    if key == WANTED_GRADIENTS:
        return tuple(sorted(value))
    if key == POLICY:
        return value.name
    if key == _CUSTOM:
        return _custom(value, node.meta) or None
    if key == _TAG:
        known = node.op == "placeholder" and not described
        known |= BACKWARD in node.meta and value == _tag(node.meta[BACKWARD])
        return None if known else value
    if key == _DESCRIBED:
        if not described and not isinstance(value, TangentAOTInput):
            return None
        return tuple(value) if isinstance(value, list) else value
    return value


def _custom(entries: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of meta["custom"] that passes read; a stage only until the node has it."""
    known = {key: value for key, value in entries.items() if isinstance(value, int | str | Member)}
    if BACKWARD in meta and STAGE in meta and known.get(CUSTOM_STAGE) == meta[STAGE]:
        del known[CUSTOM_STAGE]
    return known


def _meta(marks: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `_marks`."""
    meta = {}
    for key, value in marks.items():
        if key not in _MARKS:
            raise ValueError(f"no pass reads a mark {key}; those are {', '.join(_MARKS)}")
        meta[key] = build(value, _MARKS[key], key)
    if WANTED_GRADIENTS in meta:
        meta[WANTED_GRADIENTS] = frozenset(meta[WANTED_GRADIENTS])
    if POLICY in meta:
        if meta[POLICY] not in CheckpointPolicy.__members__:
            raise ValueError(f"{POLICY} is one of {', '.join(CheckpointPolicy.__members__)}")
        meta[POLICY] = CheckpointPolicy[meta[POLICY]]
    if BACKWARD in meta:
        meta.setdefault(_TAG, _tag(meta[BACKWARD]))
        if STAGE in meta:
            meta[_CUSTOM] = {CUSTOM_STAGE: meta[STAGE], **meta.get(_CUSTOM, {})}
    if isinstance(meta.get(_DESCRIBED), tuple):
        meta[_DESCRIBED] = list(meta[_DESCRIBED])
    return meta


def _tag(backward: bool) -> str:
    return "is_backward" if backward else "is_forward"


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node. Handles, which only this process knows, are replaced."""
    if node.target is control_flow_op and FLOW in node.meta:
        nodes = node.graph.find_nodes(op="call_function", target=control_flow_op)
        return (node.args[0], list(nodes).index(node))
    if node.target is autograd_function_op:
        return (node.args[0], function_of(node.args[1]))  # type: ignore[arg-type]
    return node.args


# --- From models to records -----------------------------------------------------------------------


def _record(model: Model) -> Any:
    if isinstance(model, Capture):
        return _of_capture(model)
    if isinstance(model, levels.Directions):
        bodies = _bodies(model.forward, model.backward)
        return Directions(bodies=bodies, forward=model.forward, backward=model.backward)
    assert isinstance(model, Partitioned)
    bodies = _bodies(*(part.graph for part in model.parts))
    return Parts(
        returned=model.returned,
        changed=tuple(model.changed.items()),
        loads=_moves(model.moves.loads),
        stores=_moves(model.moves.stores),
        inputs=model.inputs,
        outputs=model.outputs,
        bodies=bodies,
        parts=model.parts,
        cut=(_of_capture(model.capture),),
    )


def _moves(moves: Mapping[int, Iterable[Move]]) -> tuple[tuple[int, tuple[Move, ...]], ...]:
    return tuple((index, tuple(of)) for index, of in moves.items())


def _piece(piece: Piece) -> str:
    """A piece of a cut graph, whose own text reads back."""
    ends = f"({', '.join(piece.sources.values())}) -> ({', '.join(piece.results)})"
    return f"{piece.phase}: {ends}\n{write_level(piece.capture)}"


def _of_capture(capture: Capture) -> Any:
    own: dict[str, Any] = {}
    if capture.level == "traced":
        own = {"loss": capture.loss and capture.loss.name}
    else:
        own = {"gradients": capture.gradients, "loss_scale": capture.loss_scale}
    graph = capture.graph.graph
    names = [node.name if isinstance(node, fx.Node) else None for node in capture.returned]
    return (Traced if capture.level == "traced" else Joint)(
        ipus=tuple(capture.ipus.items()),
        training=capture.training,
        keeps_stages=capture.keeps_stages,
        phases=tuple(capture.phases.items()),
        alone=capture.alone,
        owners=tuple(capture.owners.items()),
        aliases=capture.aliases,
        overlaps=tuple(capture.overlaps.items()),
        names=capture.names,
        anchors=tuple(capture.anchors.items()),
        prints=tuple(capture.prints.items()),
        inputs=_inputs(capture),
        outputs=tuple(
            GraphOutput(name, role.kind, role.name)
            for name, role in zip(names, capture.outputs, strict=True)
        ),
        attributes=tuple(_attributes(capture)),
        bodies=_bodies(capture.graph),
        flows=tuple(
            Flow(
                flow.kind,
                flow.carried,
                flow.scanned,
                flow.count,
                flow.where,
                tuple(map(_of_capture, flow.bodies)),
            )
            for node in graph.find_nodes(op="call_function", target=control_flow_op)
            if (flow := node.meta.get(FLOW)) is not None
        ),
        hooks=tuple(Hook(node.name, node.meta[HOOK]) for node in graph.nodes if HOOK in node.meta),
        graph=capture.graph,
        **own,
    )


def _inputs(capture: Capture) -> tuple[GraphInput, ...]:
    roles = capture.roles()
    known = [role.name for role in roles.values() if role.name in capture.tensors]
    shared = _shared({name: capture.tensors[name] for name in known})
    inputs = []
    for node, role in roles.items():
        tensor = capture.tensors.get(role.name)
        layout: Layout | None = None
        values: str | None = ""
        value = node.meta.get("val", node.meta.get("example_value"))
        if tensor is not None and _is_strided(tensor):
            layout = Layout.of(tensor)
            if _is_strided(value):
                usual = Layout.of(value)
                layout = replace(layout, device=usual.device)
                layout = None if layout == usual else layout
            if role.kind == "constant":
                values = _values(tensor)
        inputs.append(
            GraphInput(
                node.name,
                role.name,
                role.kind,
                role.trainable,
                layout,
                values,
                shared.get(role.name),
            )
        )
    return tuple(inputs)


def _is_strided(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor whose sizes are known, with strides."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and all(type(size) is int for size in (*value.shape, *value.stride()))
    )


def _shared(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int, int]]:
    """The `memory` of those that share it."""
    places: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        memory = 0 if is_fake(tensor) else tensor.untyped_storage().data_ptr()
        if memory and _is_strided(tensor):
            places.setdefault(memory, []).append(name)
    several = [names for names in places.values() if len(names) > 1]
    return {
        name: (
            number,
            -(-tensors[name].untyped_storage().nbytes() // _ALIGNED) * _ALIGNED,
            int(tensors[name].storage_offset()),
        )
        for number, names in enumerate(several)
        for name in names
    }


def _values(tensor: torch.Tensor) -> str | None:
    """The elements of a tensor as text; None for many, and for a tensor without values."""
    if is_fake(tensor) or tensor.device.type == "meta" or tensor.nbytes > _LARGEST:
        return None
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    raw = dense.view(torch.uint8) if dense.numel() else dense.to(torch.uint8)
    return base64.b64encode(raw.numpy().tobytes()).decode()


def _attributes(capture: Capture) -> Iterator[Attribute]:
    targets = {str(node.target) for node in capture.graph.graph.find_nodes(op="get_attr")}
    for target in sorted(targets):
        tensor = getattr(capture.graph, target, None)
        if isinstance(tensor, torch.Tensor) and _is_strided(tensor):
            name, _ = capture.attributes.get(id(tensor), (target, None))
            yield Attribute(target, name, Layout.of(tensor), _values(tensor))


def _bodies(*graphs: fx.GraphModule) -> tuple[Body, ...]:
    found = (body for graph in graphs for body in all_bodies(graph.graph))
    return tuple({body.name: body for body in found}.values())


# --- From records to models -----------------------------------------------------------------------


@dataclass
class _Check:
    """Build the objects that later lines of a text need, as soon as their lines are read.

    Args:
        attributes: the tensors of the graph that is read next.
        captures: the graphs of a text, by the identity of their records.
    """

    attributes: dict[str, torch.Tensor] = field(default_factory=dict)
    captures: dict[int, Capture] = field(default_factory=dict)

    def __call__(self, record: object) -> None:
        """Raise ValueError for an impossible record."""
        match record:
            case Attribute():
                tensor = _tensor(record.target, record.tensor, record.values)
                self.attributes[record.target] = tensor
            case GraphInput(values=None):
                raise ValueError(_left_out(record.name))
            case GraphInput(memory=(_, nbytes, start)):
                if not 0 <= start <= nbytes <= _LARGEST_MEMORY or nbytes % _ALIGNED:
                    raise ValueError(f"no memory has {nbytes} bytes and a tensor at {start}")
            case Body():
                self.body(record)
            case Directions():
                _hold(record.bodies, record.forward, record.backward)
            case Parts():
                _hold(record.bodies, *(part.graph for part in record.parts))
                if len(record.cut) != 1:
                    raise ValueError("one graph was cut")
            case Traced() | Joint():
                self.graph(record)

    def body(self, body: Body) -> None:
        name = body_of(body.graph).name
        if name != body.name:
            raise ValueError(f"{body.name} has the graph of {name}, so it was changed")

    def graph(self, record: _Graph) -> None:
        self.attributes.clear()
        _hold(record.bodies, record.graph)
        graph = record.graph.graph
        inputs = [node.name for node in graph.find_nodes(op="placeholder")]
        if inputs != [tensor.node for tensor in record.inputs]:
            raise ValueError(f"its inputs are {', '.join(inputs)}")
        returned: Any = graph.output_node().args[0]
        names = [node.name if isinstance(node, fx.Node) else None for node in returned]
        if names != [result.node for result in record.outputs]:
            raise ValueError(f"it returns {', '.join(map(str, names))}")
        nodes = {node.name: node for node in graph.nodes}
        loss = getattr(record, "loss", None)
        for name in (*(hook.node for hook in record.hooks), *([loss] if loss else [])):
            if name not in nodes:
                raise ValueError(f"%{name} is not in the graph")
        flows = list(graph.find_nodes(op="call_function", target=control_flow_op))
        if len(flows) != len(record.flows):
            raise ValueError(f"it has {len(flows)} loops and branches, not {len(record.flows)}")
        for node, flow in zip(flows, record.flows, strict=True):
            bodies = [self.captures[id(body)] for body in flow.bodies]
            held = ControlFlow(
                flow.kind, bodies, flow.carried, flow.scanned, flow.count, flow.where
            )
            node.meta[FLOW] = held
            node.args = (node.args[0], register_flow(held))
        for hook in record.hooks:
            nodes[hook.node].meta[HOOK] = hook.graph
        self.captures[id(record)] = _capture(record, nodes)


def _hold(bodies: Iterable[Body], *graphs: fx.GraphModule) -> None:
    """Let nodes hold the bodies that they run."""
    named: dict[str, Body] = {}

    def known(name: str) -> Body:
        if name not in named:
            raise ValueError(f"a loop or branch runs {name}, which is no body here")
        return named[name]

    for body in bodies:
        hold_bodies(body.graph.graph, known)
        named[body.name] = body_of(body.graph)
    for graph in graphs:
        hold_bodies(graph.graph, known)


def _capture(record: Any, nodes: Mapping[str, fx.Node]) -> Capture:
    """Inverse of `_of_capture`."""
    attributes = {}
    for one in record.attributes:
        tensor = getattr(record.graph, one.target)
        attributes[id(tensor)] = (one.name, tensor)
    return Capture(
        graph=record.graph,
        placeholders=tuple(Placeholder(t.name, t.kind, t.trainable) for t in record.inputs),
        outputs=tuple(OutputRole(r.kind, r.name) for r in record.outputs),
        tensors=_tensors(record, nodes),
        structure=NO_STRUCTURE,
        training=record.training,
        level=record.level,
        loss=nodes[record.loss] if getattr(record, "loss", None) else None,
        ipus=dict(record.ipus),
        keeps_stages=record.keeps_stages,
        alone=record.alone,
        aliases=record.aliases,
        phases=dict(record.phases),
        owners=dict(record.owners),
        overlaps=dict(record.overlaps),
        loss_scale=getattr(record, "loss_scale", None),
        names=record.names,
        gradients=getattr(record, "gradients", ()),
        anchors=dict(record.anchors),
        prints=dict(record.prints),
        attributes=attributes,
    )


def _tensors(record: _Graph, nodes: Mapping[str, fx.Node]) -> dict[str, torch.Tensor]:
    """The user's tensors. Only constants have values."""
    tensors: dict[str, torch.Tensor] = {}
    memories: dict[int, torch.Tensor] = {}  # it is never touched, so it takes no room
    for one in record.inputs:
        value = nodes[one.node].meta["val"]
        if one.kind not in ("parameter", "buffer", "constant"):
            continue
        if one.tensor is None and not isinstance(value, torch.Tensor):
            raise ValueError(f"%{one.node} is no tensor")
        layout = one.tensor or Layout.of(value)
        if one.memory is not None:
            number, nbytes, start = one.memory
            memory = memories.setdefault(number, torch.empty(nbytes, dtype=torch.uint8))
            if layout.reach(start) * layout.type.dtype.itemsize > memory.nbytes:
                raise ValueError(f"{one.name} does not fit in {memory.nbytes} bytes")
            tensor = memory.view(layout.type.dtype)
            tensors[one.name] = tensor.as_strided(layout.type.shape, layout.stride, start)
        elif one.kind == "constant":
            tensors[one.name] = _tensor(one.name, layout, one.values)
        else:
            tensors[one.name] = layout.empty("meta")
    return tensors


def _tensor(name: str, layout: Layout, values: str | None) -> torch.Tensor:
    """A tensor with its values."""
    if values is None:
        raise ValueError(_left_out(name))
    tensor, raw = layout.empty("cpu"), base64.b64decode(values, validate=True)
    if len(raw) != tensor.numel() * tensor.itemsize:
        raise ValueError(f"{name} has values of {len(raw)} bytes")
    if raw:
        tensor.copy_(torch.frombuffer(bytearray(raw), dtype=tensor.dtype).reshape(tensor.shape))
    return tensor


def _left_out(name: str) -> str:
    return f"the values of {name} are left out: they take more than {_LARGEST} bytes"
