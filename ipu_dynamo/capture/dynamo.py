"""Describe what Dynamo and AOTAutograd hand over: the captured graph, and its flat passes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import Capture, OutputRole, Placeholder, Structure
from ipu_dynamo.capture.checks import call_checks
from ipu_dynamo.capture.private.tracing import (
    PlainAOTInput,
    TangentAOTInput,
    fake_mode,
    flatten,
    marked_dynamic,
    source_name,
    static,
    to_fake,
    unbacked_symbols,
)
from ipu_dynamo.capture.read_values import avoid_reading_values
from ipu_dynamo.capture.unplaceable import refuse_sizes_from_values
from ipu_dynamo.capture.unsupported import refuse_graphs_in_graphs
from ipu_dynamo.errors import CompileError, source_line
from ipu_dynamo.ops.markers import begin_block, end_block

aten = torch.ops.aten
_MARKERS = {torch.ops.ipu.begin_block: begin_block, torch.ops.ipu.end_block: end_block}
_IN_MODULE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def read_markers(gm: fx.GraphModule) -> list[fx.Node]:
    """Give the block markers of Dynamo's graph the form in which passes know them.

    Raises:
        CompileError: a marker stands inside a higher-order operator, or alone in the graph.
    """
    found = []
    for module in _graphs(gm):
        for node in module.graph.nodes:
            if node.target in _MARKERS:
                node.target = _MARKERS[node.target]
            if node.target not in _MARKERS.values():
                continue
            node.meta.setdefault("val", None)
            found.append(node)
            if module is not gm:
                raise CompileError(
                    "a block begins or ends inside a checkpoint, a condition or another operator "
                    "that holds a graph of its own",
                    node=node,
                    hint="put the block around the whole of it",
                )
    if found and not any(_works(node) for node in gm.graph.nodes):
        block = f"block {found[0].args[0]!r} begins" if found[0].args else "a block ends"
        raise CompileError(
            f"{block} right before a graph break, so what it holds would run outside the program",
            node=found[0],
            hint="compile with fullgraph=True to see why PyTorch breaks the graph inside the block",
        )
    return found


def specialise(gm: fx.GraphModule, examples: Sequence[object]) -> None:
    """Fix every symbolic size to its value in this call; another size then compiles again.

    Raises:
        CompileError: the user asked for a dynamic dimension.
    """
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True):
        if dimensions := marked_dynamic(example):
            raise CompileError(
                f"dimension {dimensions[0]} of {readable_source(source_name(node))} is marked as "
                f"dynamic, and programs have static shapes",
                hint="leave out torch._dynamo.mark_dynamic: each new size compiles once",
            )
        for value in (example, node.meta.get("example_value")):
            _fix(value)
            if isinstance(value, Tensor):
                for size in (*value.shape, *value.stride(), value.storage_offset()):
                    _fix(size)


def describe_inputs(gm: fx.GraphModule, examples: Sequence[object]) -> list[Placeholder]:
    """The role of each input of Dynamo's graph, under a name of its own."""
    roles: list[Placeholder] = []
    taken: set[str] = set()
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True):
        source = source_name(node)
        name = readable_source(source)
        while name in taken:
            name += "'"
        taken.add(name)
        if isinstance(example, nn.Parameter):
            roles.append(Placeholder(name, "parameter", example.requires_grad))
        elif "._buffers[" in source:
            roles.append(Placeholder(name, "buffer"))
        else:
            roles.append(Placeholder(name, "input"))
    return roles


@dataclass
class FlatPass:
    """A forward or backward graph as a capture, and how it is called.

    Args:
        arguments: names in calling order; constants of the graph follow the caller's.
        constants: the tensors of those.
        results: for each returned value the name of an argument or of a `value` output; numbers
            and None stand for themselves.
    """

    capture: Capture
    arguments: list[str] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    results: list[str | float | None] = field(default_factory=list)


def read_pass(
    graph: fx.GraphModule,
    roles: Sequence[Placeholder],
    known: Mapping[str, Placeholder],
) -> FlatPass:
    """Describe a graph that AOTAutograd made.

    Args:
        roles: the inputs of Dynamo's graph.
        known: roles of the forward graph's placeholders, by node name; backward reads some again.

    Raises:
        CompileError: the graph has an operator or a size that programs cannot have.
    """
    call_checks(graph.graph)
    refuse_graphs_in_graphs(graph.graph)
    avoid_reading_values(graph.graph)
    _fix_sizes(graph.graph)
    _remove_detach(graph.graph)
    capture = Capture(
        graph=graph,
        placeholders=(),
        outputs=(),
        tensors={},
        structure=Structure(flatten(())[1], (), ()),
        training=False,
        aliases=True,
    )
    flat = FlatPass(capture)
    placeholders = []
    for node in capture.placeholder_nodes:
        role = _role(node, roles, known)
        while role.name in flat.arguments:  # an input and a saved value
            role = replace(role, name=f"{role.name}'")
        flat.arguments.append(role.name)
        if isinstance(node.meta["val"], Tensor):
            placeholders.append(role)
        else:
            graph.graph.erase_node(node)  # a size, which is part of the program, or a token
    constants = dict(_lift_constants(capture))
    placeholders += constants
    flat.arguments += [role.name for role in constants]
    flat.constants += constants.values()
    capture.placeholders = tuple(placeholders)
    capture.tensors = {
        role.name: constants.get(role, node.meta["val"])
        for node, role in capture.roles().items()
        if role.kind != "input"
    }
    _describe_outputs(flat)
    graph.recompile()
    return flat


def _describe_outputs(flat: FlatPass) -> None:
    """Return each computed value once; the caller has the arguments among the results itself."""
    capture = flat.capture
    names = {node: role.name for node, role in capture.roles().items()}
    kept: dict[fx.Node, str] = {}
    for node in capture.returned:
        if not isinstance(node, fx.Node):
            flat.results.append(node)
        elif node in names:
            flat.results.append(names[node])
        else:
            flat.results.append(kept.setdefault(node, str(len(kept))))
    capture.set_returned(list(kept), [OutputRole("value", name) for name in kept.values()])


def _role(
    node: fx.Node, roles: Sequence[Placeholder], known: Mapping[str, Placeholder]
) -> Placeholder:
    if node.name in known:
        return known[node.name]
    source = node.meta.get("desc")
    if isinstance(source, PlainAOTInput):
        return roles[source.idx]
    if isinstance(source, TangentAOTInput):
        return Placeholder(node.name.replace("tangents_", "gradient_of_output_"), "input")
    return Placeholder(node.name, "input")


def _lift_constants(capture: Capture) -> Iterator[tuple[Placeholder, Tensor]]:
    """Turn tensors that the graph holds into placeholders, after all others."""
    graph = capture.graph.graph
    for node in list(graph.find_nodes(op="get_attr")):
        value = getattr(capture.graph, str(node.target))
        last = next(reversed(capture.placeholder_nodes), None)
        with graph.inserting_after(last) if last else graph.inserting_before(None):
            lifted = graph.placeholder(str(node.target).lstrip("_"))
        lifted.meta["val"] = node.meta["val"] if "val" in node.meta else to_fake(fake_mode(), value)
        node.replace_all_uses_with(lifted)
        graph.erase_node(node)
        yield Placeholder(lifted.name, "constant"), value.detach()


def _fix_sizes(graph: fx.Graph) -> None:
    """Put numbers in place of symbolic sizes, in values and arguments; `specialise` fixed them."""
    known: set[str] = set()
    unknown: list[fx.Node] = []
    for node in list(graph.nodes):
        before = node.meta.get("val")
        value = node.meta["val"] = static(before)
        if value is None and before is not None:
            new = unbacked_symbols(before) - known
            known |= new
            unknown += [node] if new else []
        if isinstance(value, int | float):
            for user in list(node.users):
                swap = partial(_swap, node, value)
                user.args, user.kwargs = map_arg((user.args, dict(user.kwargs)), swap)
            if node.op != "placeholder":
                graph.erase_node(node)
    refuse_sizes_from_values(unknown)


def _swap(node: fx.Node, value: float, found: fx.Node) -> Any:
    return value if found is node else found


def _remove_detach(graph: fx.Graph) -> None:
    """Read what is detached instead: inside the flat graph nothing is differentiated.

    Returned values stay, since a detached output must not be the same tensor as its source.
    """
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            graph.erase_node(node)


def _works(node: fx.Node) -> bool:
    return node.op.startswith("call") and node.target not in _MARKERS.values()


def _graphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def _fix(size: object) -> None:
    """Specialise a symbol, which makes its present value a guard."""
    if isinstance(size, torch.SymInt):
        int(size)
    elif isinstance(size, torch.SymFloat):
        float(size)
    elif isinstance(size, torch.SymBool):
        bool(size)


def readable_source(source: str) -> str:
    """A source as users write it: `L['self']._modules['fc']._parameters['bias']` is `fc.bias`."""
    text = _IN_MODULE.sub(r".\1", source)
    if text != source:  # in a module; Dynamo calls one that torch itself defines `fn`
        text = re.sub(r"^L\['(?:self|fn)'\]\.", "", text)
    return re.sub(r"^[LG]\['([^']*)'\]", r"\1", text)


def last_block(markers: Sequence[fx.Node]) -> str | None:
    """Where the block began that is still open at the end of the graph, or None."""
    if not markers or markers[-1].target is end_block:
        return None
    return source_line(markers[-1])
