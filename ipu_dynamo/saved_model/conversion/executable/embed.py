"""Compile the IPU nodes of a converted program into a file, and leave a call of it in their place.

Before   host nodes, IPU nodes, host nodes
After    host nodes; %call = ipu.run_executable([...], checksum, [...]); its results; host nodes
Keeps    the signature, the names of the host's nodes, and values; a number of rows that calls
         choose stays theirs.
Source   IPU TensorFlow Addons, "IPU SavedModel CLI": embedded_runtime_save_config.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.library.run_executable import layout, run_executable
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.saved_model.conversion.drafts.draft import HOST, Draft, Placement
from ipu_dynamo.saved_model.conversion.drafts.fixed_program import MicroBatch, micro_batch_of
from ipu_dynamo.saved_model.conversion.drafts.node_groups import name_of, set_name
from ipu_dynamo.saved_model.conversion.executable.compile_part import compile_part
from ipu_dynamo.saved_model.conversion.executable.compiled_part import (
    Border,
    border,
    is_inside,
)
from ipu_dynamo.saved_model.conversion.executable.executable_file import (
    STEM,
    SUFFIX,
    described,
    write_program,
)
from ipu_dynamo.saved_model.conversion.settings.ipu_config import settings_of
from ipu_dynamo.saved_model.conversion.settings.options import ConversionOptions
from ipu_dynamo.saved_model.conversion.settings.pipeline_config import Solution
from ipu_dynamo.saved_model.exported.node_names import Kind

CALL = "ipu_executable"  # canonical name of the call


@dataclass(frozen=True, slots=True)
class Embedded:
    """A program that calls an executable.

    Attributes:
        file: the executable, next to the place where the program will be.
        digest: its checksum.
        description: of the file next to it, without the executable's final name.
        batch_size: rows of a micro-batch.
        batch_per_step: micro-batches of a step, for each stage of a pipeline.
    """

    draft: Draft
    file: Path
    digest: str
    description: Mapping[str, Any]
    batch_size: int
    batch_per_step: int


def embed(
    draft: Draft,
    options: ConversionOptions,
    *,
    num_ipus: int,
    solution: Solution | None,
    folder: Path,
) -> Embedded:
    """Compile the nodes of IPUs, and change the draft so that it calls them.

    Args:
        draft: after all passes, with its last placement.
        num_ipus: that there are.
        solution: the stages of a pipeline.
        folder: to write into.

    Raises:
        ValueError: the program has no form that can be compiled, or host nodes between IPU nodes.
    """
    config = options.embedded_runtime_save_config
    assert config is not None
    _check_order(draft)
    shapes = {name: tuple(node.meta["val"].shape) for name, node in draft.inputs.items()}
    micro_batch = micro_batch_of(shapes, options.batch_size)
    batch_per_step = max(1, options.batch_per_step)
    edges = border(draft)
    _check_edges(draft, edges, micro_batch)
    settings = settings_of(options, num_ipus)
    compiled = compile_part(draft, edges, micro_batch, settings.core_options(), batch_per_step)
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / f"{STEM}{SUFFIX}"
    digest = write_program(program, compiled)
    return Embedded(
        with_call(draft, edges, digest, micro_batch),
        program,
        digest,
        described(
            compiled,
            settings,
            digest=digest,
            batch_per_step=batch_per_step,
            runtime_api_timeout_us=config.runtime_api_timeout_us,
            pipeline=None if solution is None else solution.to_json(),
        ),
        micro_batch.size,
        batch_per_step,
    )


def _check_order(draft: Draft) -> None:
    """Raise for a host node that reads IPU nodes, and that IPU nodes read."""
    behind: dict[fx.Node, bool] = {}  # host nodes with an IPU node before them
    for node in draft.graph.nodes:
        if node.op != "call_function":
            continue
        inside = is_inside(node, draft.placement)
        if inside:
            for source in node.all_input_nodes:
                if behind.get(source) and isinstance(source.meta.get("val"), Tensor):
                    raise ValueError(
                        f"embedded_runtime_save_config: host node {name_of(source)!r} lies between "
                        "IPU nodes; place it on an IPU, or place what is before or behind it on "
                        "the host (excluded_nodes)"
                    )
            continue
        behind[node] = any(
            is_inside(source, draft.placement) or behind.get(source, False)
            for source in node.all_input_nodes
        )


def _check_edges(draft: Draft, edges: Border, micro_batch: MicroBatch) -> None:
    """Raise unless all that is cut into micro-batches has its rows in front."""
    if not edges.inputs:
        raise ValueError("embedded_runtime_save_config: no IPU node reads an input")
    if micro_batch.symbol is None:
        return
    results = {node: f"output {name!r}" for name, node in draft.outputs.items()}
    inputs = {node: f"input {name!r}" for name, node in draft.inputs.items()}
    for nodes, kinds in ((edges.inputs, inputs), (edges.outputs, results)):
        for name, node in nodes.items():
            shape = node.meta["val"].shape
            leads = len(shape) and isinstance(shape[0], torch.SymInt)
            if not leads or shape[0].node.expr != micro_batch.symbol:
                raise ValueError(
                    f"{kinds.get(node, f'node {name!r}')} has the shape {_shown(shape)}, whose "
                    "leading dimension is not that of the inputs: a program that is compiled for a "
                    "micro-batch has it in front of all that it takes and gives; export it with a "
                    "fixed number of rows"
                )


def with_call(draft: Draft, edges: Border, digest: str, micro_batch: MicroBatch) -> Draft:
    """The program of the host's nodes, with a call and its results for the compiled ones."""
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    before, behind = _host_nodes(draft, edges)
    inputs = {name: _copied(graph, node, values) for name, node in draft.inputs.items()}
    tensors = {
        _copied(graph, node, values): tensor
        for node, tensor in draft.tensors.items()
        if any(user in before or user in behind for user in node.users)
        or node in draft.outputs.values()
    }
    for node in before:
        _copied(graph, node, values)
    results = [node.meta["val"] for node in edges.outputs.values()]
    layouts = [layout(value.dtype, _sizes(value.shape, micro_batch)) for value in results]
    arguments = [values[node] for node in edges.inputs.values()]
    call = graph.call_function(run_executable, (arguments, digest, layouts))
    call.meta["val"] = results
    name = _unused(draft)
    set_name(call, name)
    for position, node in enumerate(edges.outputs.values()):
        values[node] = graph.call_function(getitem, (call, position))
        values[node].meta["val"] = node.meta["val"]
        set_name(values[node], name)
    for node in behind:
        _copied(graph, node, values)
    outputs = {name: values[node] for name, node in draft.outputs.items()}
    graph.output(tuple(outputs.values()))
    graph.lint()
    result = Draft(
        module_of(graph),
        inputs,
        tensors,
        outputs,
        range_constraints=_ranges(draft, micro_batch, [*before, *behind]),
        defaults=draft.defaults,
        method_name=draft.method_name,
    )
    result.source_names = draft.source_names
    host = {group.name: HOST for group in result.groups() if not group.is_size}
    names = {g.name for g in result.groups() if g.kind is Kind.OP}
    result.placement = Placement({n: at for n, at in host.items() if n in names})
    return result


def _ranges(draft: Draft, micro_batch: MicroBatch, host: Sequence[fx.Node]) -> Mapping[Any, Any]:
    """The sizes that calls may choose: one row is enough for an executable, where the host only
    casts; exported programs often say two."""
    ranges, symbol = dict(draft.range_constraints), micro_batch.symbol
    casts = {node for group in draft.groups() if group.is_cast for node in group.nodes}
    if symbol in ranges and casts.issuperset(host) and ranges[symbol].lower > 1:
        ranges[symbol] = type(ranges[symbol])(1, ranges[symbol].upper)
    return ranges


def _host_nodes(draft: Draft, edges: Border) -> tuple[list[fx.Node], list[fx.Node]]:
    """The host's nodes that something needs: those before the compiled ones, and those behind."""
    nodes = [node for node in draft.graph.nodes if node.op == "call_function"]
    inside = {node for node in nodes if is_inside(node, draft.placement)}
    needed = {*draft.outputs.values(), *edges.inputs.values()}
    for node in reversed(nodes):
        if node in needed and node not in inside:
            needed |= set(node.all_input_nodes)
    before: list[fx.Node] = []
    behind: list[fx.Node] = []
    later = set(inside)
    for node in nodes:
        if node in inside or node not in needed:
            continue
        if any(source in later for source in node.all_input_nodes):
            later.add(node)
            behind.append(node)
        else:
            before.append(node)
    return before, behind


def _copied(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, fx.Node]) -> fx.Node:
    values[node] = graph.node_copy(node, lambda source: values[source])
    return values[node]


def _sizes(shape: Any, micro_batch: MicroBatch) -> list[int | None]:
    return [
        None
        if isinstance(size, torch.SymInt) and size.node.expr == micro_batch.symbol
        else int(size)
        for size in shape
    ]


def _unused(draft: Draft) -> str:
    names, name, count = {group.name for group in draft.groups()}, CALL, 0
    while name in names:
        count += 1
        name = f"{CALL}_{count}"
    return name


def _shown(shape: Any) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
