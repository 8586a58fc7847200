"""Describe what Dynamo and AOTAutograd hand over: the captured graph, and its flat passes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, fx, nn

from ipu_dynamo.capture.capture import Joint, OutputRole, Placeholder, Report, Traced
from ipu_dynamo.capture.private.aot import PlainAOTInput, TangentAOTInput
from ipu_dynamo.capture.private.dynamo import marked_dynamic, source_name
from ipu_dynamo.errors import CompileError, note_module, source_line
from ipu_dynamo.ops.control_flow import hold_bodies
from ipu_dynamo.ops.marks.markers import end_block
from ipu_dynamo.ops.private.node_meta import DESC, EXAMPLE_VALUE, MODULE_STACK, TANGENTS
from ipu_dynamo.program.ir.made_names import users

_OWNER = re.compile(r"^[LG]\['[^']*'\]\.?")
_IN_MODULE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


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
        for value in (example, node.meta.get(EXAMPLE_VALUE)):
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
        name = users(readable_source(source))
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


def note_modules(gm: fx.GraphModule) -> None:
    """Let operators without a line of the user's be known by the modules that call them."""
    for node in gm.graph.nodes:
        if node.op.startswith("call") and (calling := node.meta.get(MODULE_STACK)):
            path, kind = [*calling.values()][-1]
            path = _OWNER.sub("", _IN_MODULE.sub(r".\1", path))
            note_module(node, path, getattr(kind, "__name__", str(kind)))


def root_class(gm: fx.GraphModule) -> str:
    """The class of the module that Dynamo captured; empty: it was a function."""
    stacks = (node.meta.get(MODULE_STACK) for node in gm.graph.nodes)
    first = next((stack for stack in stacks if stack), {"": ("", "")})
    _, kind = next(iter(first.values()))
    return str(getattr(kind, "__name__", kind))


def describe_graph(gm: fx.GraphModule, examples: Sequence[object]) -> Traced:
    """Dynamo's graph as a capture, to be placed; AOTAutograd makes the programs' graphs of it."""
    returned = gm.graph.output_node().args[0]
    assert isinstance(returned, tuple | list)
    roles = describe_inputs(gm, examples)
    tensors = {r.name: x for r, x in zip(roles, examples, strict=True) if isinstance(x, Tensor)}
    return Traced(
        graph=gm,
        placeholders=tuple(roles),
        outputs=tuple(OutputRole("value", str(i)) for i in range(len(returned))),
        report=Report(tensors=tensors),
    )


@dataclass
class FlatPass:
    """A forward or backward graph as a capture, and how it is called.

    Args:
        arguments: names in calling order; constants of the graph follow the caller's.
        constants: the tensors of those.
        results: for each returned value the name of an argument or of a `value` output; numbers
            and None stand for themselves.
    """

    capture: Joint
    arguments: list[str] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    results: list[str | float | None] = field(default_factory=list)


def open_pass(
    graph: fx.GraphModule,
    roles: Sequence[Placeholder],
    known: Mapping[str, Placeholder],
    ipus: dict[int, int],
    alone: Literal["forward", "backward"] | None = None,
) -> FlatPass:
    """Describe a graph that AOTAutograd made: sizes, tokens and constants are still in it.

    Args:
        roles: the inputs of Dynamo's graph.
        known: roles of the forward graph's placeholders, by node name; backward reads some again.
        ipus: of the stages.
    """
    hold_bodies(graph.graph)
    nodes = list(graph.graph.find_nodes(op="placeholder"))
    arguments: list[str] = []
    described = []
    for node in nodes:
        role = _role(node, roles, known)
        while role.name in arguments:  # an input and a saved value
            role = replace(role, name=f"{role.name}'")
        arguments.append(role.name)
        described.append(role)
    returned = graph.graph.output_node().args[0]
    assert isinstance(returned, tuple | list)
    capture = Joint(
        graph=graph,
        placeholders=tuple(described),
        outputs=tuple(OutputRole("value", str(i)) for i in range(len(returned))),
        ipus=ipus,
        report=Report(tensors=_examples(dict(zip(nodes, described, strict=True)))),
        alone=alone,
        aliases=True,
    )
    return FlatPass(capture, arguments)


def describe_call(flat: FlatPass) -> None:
    """Say how a graph is called whose constants were lifted, and where its results are found once
    it returns `computed_results`."""
    capture = flat.capture
    new = [r.name for r in capture.placeholders if r.name not in flat.arguments]
    lifted = {name: capture.report.tensors[name] for name in new}
    capture.report.tensors = {**_examples(capture.roles()), **lifted}
    flat.arguments += lifted
    flat.constants += lifted.values()
    names = {node: role.name for node, role in capture.roles().items()}
    names |= {node: str(place) for place, node in enumerate(computed_results(capture))}
    flat.results += [names[x] if isinstance(x, fx.Node) else x for x in capture.returned]


def computed_results(capture: Joint) -> list[fx.Node]:
    """The values that a graph computes and returns, each once."""
    nodes = (node for node in capture.returned if isinstance(node, fx.Node))
    return list(dict.fromkeys(node for node in nodes if node.op != "placeholder"))


def _examples(roles: Mapping[fx.Node, Placeholder]) -> dict[str, Tensor]:
    """Fake tensors of the parameters and buffers; the caller passes the real ones."""
    return {role.name: n.meta["val"] for n, role in roles.items() if role.kind != "input"}


def _role(
    node: fx.Node, roles: Sequence[Placeholder], known: Mapping[str, Placeholder]
) -> Placeholder:
    if node.name in known:
        return known[node.name]
    source = node.meta.get(DESC)
    if isinstance(source, PlainAOTInput):
        return roles[source.idx]
    if isinstance(source, TangentAOTInput):
        return Placeholder(node.name.replace(TANGENTS, "gradient_of_output_"), "input")
    return Placeholder(node.name, "input")


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
