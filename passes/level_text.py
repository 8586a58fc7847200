"""Write models at all levels as text, and read most of them back, for dumps and `opt`.

    ipu_dynamo joint, form 1
    JointGraph(training=True)
      inputs
        GraphInput(node="primals_1", name="fc.weight", kind="parameter", trainable=True)
      outputs
        GraphOutput(node="t_2", kind="gradient", name="fc.weight")
      graph
        %primals_1: f32[3,8] = placeholder
        %t: f32[8,3]{1,8} = aten.t.default(%primals_1)  {"ipu.stage": 0, "ipu.backward": False}
        ...

Programs have the text of `ipu_dynamo/program/text/`. Traced and joint graphs, directions and parts
use the same mechanism: dataclasses are records, and only the text that `write_level` writes is
read. The other levels are only listed, for readers. Parameters and buffers have no values in a
text. A text has neither the structure of the results that the user gets, nor the tensors from
outside the model that a trace read.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, cast, get_args

import torch
from torch import fx

from ipu_dynamo.capture.capture import (
    Capture,
    Joint,
    OutputRole,
    Placeholder,
    Report,
    Traced,
)
from ipu_dynamo.capture.control_flow.trace_control_flow import ControlFlow
from ipu_dynamo.capture.private.tracing import is_fake
from ipu_dynamo.ops.bodies import Body, all_bodies
from ipu_dynamo.ops.control_flow import FLOW, control_flow_op, hold_bodies, register_flow
from ipu_dynamo.ops.marks.inner_gradients import HOOK
from ipu_dynamo.ops.private.node_meta import EXAMPLE_VALUE
from ipu_dynamo.passes import levels
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.level_records import (
    DirectionGraphs,
    Graph,
    GraphAttribute,
    GraphFlow,
    GraphHook,
    GraphInput,
    GraphOutput,
    JointGraph,
    StageParts,
    TracedGraph,
)
from ipu_dynamo.passes.levels import Model, Moves, Partitioned
from ipu_dynamo.passes.listing import host_lines, listing
from ipu_dynamo.passes.micro_batch.placements import Piece
from ipu_dynamo.passes.node_marks import graph_form
from ipu_dynamo.program import HostProgram, Program
from ipu_dynamo.program.ir.function import body_of
from ipu_dynamo.program.ir.layout import Layout
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.text.graph_text import opaque
from ipu_dynamo.program.text.indented import LineError
from ipu_dynamo.program.text.literals import write
from ipu_dynamo.program.text.program_text import (
    parse_text,
    read_record,
    record_text,
    write_text,
)

_LARGEST = 1 << 16  # bytes of a constant, beyond which its values are left out
_LARGEST_MEMORY, _ALIGNED = 1 << 62, 16  # bytes of shared memory in a text
_RECORDS = {
    "traced": TracedGraph,
    "joint": JointGraph,
    "directions": DirectionGraphs,
    "parts": StageParts,
}


def write_level(model: Model) -> str:
    """A model at any level as text. Python objects in it print as their names."""
    level = levels.level_of(model)
    if isinstance(model, levels.SplitCapture | levels.Update):
        return f"{_first(level)}\n{listing(model)}\n"
    if isinstance(model, levels.BatchPieces):
        return "\n".join([_first(level), *map(_piece, model.pieces)])
    if isinstance(model, HostProgram):
        return "\n".join([*host_lines(model), ""])
    if isinstance(model, Program):
        return write_text(model)
    return record_text(_record(model), _first(level), graph_form({}))


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
        if only := [level for level in get_args(levels.Level) if first == _first(level)]:
            raise LineError(f"line 1: level {only[0]} is only listed, and does not read back")
        raise LineError(f"line 1: expected one of {known}, or a program, and found {first!r}")
    check = _Check()
    form = graph_form(check.attributes)
    record = read_record(text, _RECORDS[level], _first(level), check, form)
    if isinstance(record, DirectionGraphs):
        return levels.Directions(record.forward, record.backward, record.kept, record.read)
    if isinstance(record, StageParts):
        joint = check.captures[id(record.cut)]
        assert isinstance(joint, Joint), "its record is a JointGraph"
        moves = ({i: [*of] for i, of in m.items()} for m in (record.loads, record.stores))
        return Partitioned(
            record.parts,
            record.returned,
            dict(record.changed),
            joint,
            Moves(*moves),
            record.inputs,
            record.outputs,
            {collective.result: collective for collective in record.collectives},
        )
    return check.captures[id(record)]


def pass_text(step: Pass) -> str:
    """A pass with its options, as `opt` takes it: `Recompute(mode="all")`."""
    return write(step, otherwise=opaque)


def _first(level: str) -> str:
    return f"ipu_dynamo {level}, form 1"


# --- From models to records -----------------------------------------------------------------------


def _record(model: Model) -> Any:
    if isinstance(model, Traced | Joint):
        return _of_capture(model)
    if isinstance(model, levels.Directions):
        bodies = _bodies(model.forward, model.backward)
        return DirectionGraphs(
            kept=model.kept,
            read=model.read,
            bodies=bodies,
            forward=model.forward,
            backward=model.backward,
        )
    assert isinstance(model, Partitioned)
    bodies = _bodies(*(part.graph for part in model.parts))
    return StageParts(
        returned=model.returned,
        changed=model.changed,
        loads=model.moves.loads,
        stores=model.moves.stores,
        inputs=model.inputs,
        outputs=model.outputs,
        collectives=tuple(model.collectives.values()),
        bodies=bodies,
        parts=model.parts,
        cut=_of_capture(model.capture),
    )


def _piece(piece: Piece) -> str:
    """A piece of a cut graph, whose own text reads back."""
    ends = f"({', '.join(piece.sources.values())}) -> ({', '.join(piece.results)})"
    return f"{piece.phase}: {ends}\n{write_level(piece.capture)}"


def _of_capture(capture: Traced | Joint) -> Any:
    own: dict[str, Any]
    if isinstance(capture, Joint):
        own = {
            "alone": capture.alone,
            "aliases": capture.aliases,
            "gradients": capture.report.gradients,
            "loss_scale": capture.loss_scale,
            "checkpointed": capture.checkpointed,
        }
    else:
        own = {"loss": capture.loss and capture.loss.name}
    graph = capture.graph.graph
    names = [node.name if isinstance(node, fx.Node) else None for node in capture.returned]
    return (JointGraph if isinstance(capture, Joint) else TracedGraph)(
        ipus=capture.ipus,
        training=capture.training,
        keeps_stages=capture.keeps_stages,
        separate_last=capture.separate_last,
        phases=capture.phases,
        overlaps=capture.report.overlaps,
        names=capture.report.names,
        anchors=capture.report.anchors,
        prints=capture.report.prints,
        inputs=_inputs(capture),
        outputs=tuple(
            GraphOutput(name, role.kind, role.name)
            for name, role in zip(names, capture.outputs, strict=True)
        ),
        attributes=tuple(_attributes(capture)),
        bodies=_bodies(capture.graph),
        flows=tuple(
            GraphFlow(
                flow.kind,
                flow.carried,
                flow.scanned,
                flow.count,
                flow.where,
                tuple(map(_of_capture, flow.bodies)),
            )
            for node in graph.nodes
            if (flow := node.meta.get(FLOW)) is not None
        ),
        whole=() if capture.whole is None else (_of_capture(capture.whole),),
        hooks=tuple(
            GraphHook(node.name, node.meta[HOOK]) for node in graph.nodes if HOOK in node.meta
        ),
        graph=capture.graph,
        **own,
    )


def _inputs(capture: Capture) -> tuple[GraphInput, ...]:
    roles = capture.roles()
    tensors = capture.report.tensors
    held = (r.name for r in roles.values() if r.kind != "constant" and r.name in tensors)
    shared = _shared({name: tensors[name] for name in held})
    inputs = []
    for node, role in roles.items():
        tensor = tensors.get(role.name)
        layout: Layout | None = None
        values: str | None = ""
        value = node.meta.get("val", node.meta.get(EXAMPLE_VALUE))
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


def _attributes(capture: Capture) -> Iterator[GraphAttribute]:
    targets = {str(node.target) for node in capture.graph.graph.find_nodes(op="get_attr")}
    for target in sorted(targets):
        tensor = getattr(capture.graph, target, None)
        if isinstance(tensor, torch.Tensor) and _is_strided(tensor):
            name, _ = capture.report.attributes.get(id(tensor), (target, None))
            yield GraphAttribute(target, name, Layout.of(tensor), _values(tensor))


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
    captures: dict[int, Traced | Joint] = field(default_factory=dict)

    def __call__(self, record: object) -> None:
        """Raise ValueError for an impossible record."""
        match record:
            case GraphAttribute():
                tensor = _tensor(record.target, record.tensor, record.values)
                self.attributes[record.target] = tensor
            case GraphInput(values=None):
                raise ValueError(_left_out(record.name))
            case GraphInput(kind="constant", memory=(_, _, _)):
                raise ValueError(f"{record.name} is a constant, which shares no memory")
            case GraphInput(memory=(_, nbytes, start)):
                if not 0 <= start <= nbytes <= _LARGEST_MEMORY or nbytes % _ALIGNED:
                    raise ValueError(f"no memory has {nbytes} bytes and a tensor at {start}")
            case Body():
                self.body(record)
            case DirectionGraphs():
                _hold(record.bodies, record.forward, record.backward)
            case StageParts():
                _hold(record.bodies, *(part.graph for part in record.parts))
            case TracedGraph() | JointGraph():
                self.graph(record)

    def body(self, body: Body) -> None:
        name = body_of(body.graph).name
        if name != body.name:
            raise ValueError(f"{body.name} has the graph of {name}, so it was changed")

    def graph(self, record: Graph) -> None:
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
        flows = [n for n in graph.nodes if n.target is control_flow_op or FLOW in n.meta]
        if len(flows) != len(record.flows):
            raise ValueError(f"it has {len(flows)} loops and branches, not {len(record.flows)}")
        for node, flow in zip(flows, record.flows, strict=True):
            bodies = cast(list[Traced], [self.captures[id(body)] for body in flow.bodies])
            held = ControlFlow(
                flow.kind, bodies, flow.carried, flow.scanned, flow.count, flow.where
            )
            node.meta[FLOW] = held
            node.args = (node.args[0], register_flow(held))
        for hook in record.hooks:
            nodes[hook.node].meta[HOOK] = hook.graph
        whole = next((self.captures[id(one)] for one in record.whole), None)
        self.captures[id(record)] = _capture(record, nodes, whole)


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


def capture_of(record: Graph) -> Traced | Joint:
    """The capture that a record describes.

    Raises:
        ValueError: parts of the record do not fit together.
    """
    check = _Check()
    for flow in record.flows:
        check.captures |= {id(body): capture_of(body) for body in flow.bodies}
    check.captures |= {id(one): capture_of(one) for one in record.whole}
    check(record)
    return check.captures[id(record)]


def _capture(
    record: Any, nodes: Mapping[str, fx.Node], whole: Traced | Joint | None
) -> Traced | Joint:
    """Inverse of `_of_capture`."""
    attributes = {}
    for one in record.attributes:
        tensor = getattr(record.graph, one.target)
        attributes[id(tensor)] = (one.name, tensor)
    known: dict[str, Any] = {
        "graph": record.graph,
        "placeholders": tuple(Placeholder(t.name, t.kind, t.trainable) for t in record.inputs),
        "outputs": tuple(OutputRole(r.kind, r.name) for r in record.outputs),
        "training": record.training,
        "ipus": dict(record.ipus),
        "keeps_stages": record.keeps_stages,
        "separate_last": record.separate_last,
        "phases": dict(record.phases),
        "whole": whole,
        "report": Report(
            tensors=_tensors(record, nodes),
            attributes=attributes,
            overlaps=dict(record.overlaps),
            names=record.names,
            gradients=getattr(record, "gradients", ()),
            anchors=dict(record.anchors),
            prints=dict(record.prints),
        ),
    }
    if isinstance(record, TracedGraph):
        return Traced(loss=nodes[record.loss] if record.loss else None, **known)
    return Joint(
        alone=record.alone,
        aliases=record.aliases,
        loss_scale=record.loss_scale,
        checkpointed=record.checkpointed,
        **known,
    )


def _tensors(record: Graph, nodes: Mapping[str, fx.Node]) -> dict[str, torch.Tensor]:
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
            if number not in memories:
                memories[number] = _empty(Layout(TensorType(torch.uint8, (nbytes,)), (1,)))
            memory = memories[number]
            if layout.reach(start) * layout.type.dtype.itemsize > memory.nbytes:
                raise ValueError(f"{one.name} does not fit in {memory.nbytes} bytes")
            tensor = memory.view(layout.type.dtype)
            tensors[one.name] = tensor.as_strided(layout.type.shape, layout.stride, start)
        elif one.kind == "constant":
            tensors[one.name] = _tensor(one.name, layout, one.values)
        else:
            tensors[one.name] = layout.empty("meta")
    return tensors


def _empty(layout: Layout) -> torch.Tensor:
    """A tensor on the CPU."""
    try:
        return layout.empty("cpu")
    except RuntimeError as error:
        raise ValueError(f"this machine has no memory for {layout}") from error


def _tensor(name: str, layout: Layout, values: str | None) -> torch.Tensor:
    """A tensor with its values."""
    if values is None:
        raise ValueError(_left_out(name))
    tensor, raw = _empty(layout), base64.b64decode(values, validate=True)
    if len(raw) != tensor.numel() * tensor.itemsize:
        raise ValueError(f"{name} has values of {len(raw)} bytes")
    if raw:
        tensor.copy_(torch.frombuffer(bytearray(raw), dtype=tensor.dtype).reshape(tensor.shape))
    return tensor


def _left_out(name: str) -> str:
    return f"the values of {name} are left out: they take more than {_LARGEST} bytes"
