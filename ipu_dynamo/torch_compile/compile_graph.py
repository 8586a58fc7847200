"""Compile a region that Dynamo captured: place its blocks, differentiate it, make its programs."""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from ipu_dynamo.capture.capture import Placeholder
from ipu_dynamo.capture.dynamo import (
    describe_inputs,
    read_markers,
    read_pass,
    specialise,
)
from ipu_dynamo.capture.idle_dropout import remove_idle_dropout
from ipu_dynamo.capture.private.tracing import (
    allow_retain_graph,
    aot_cache_forced,
    compile_passes,
    outside_tracing,
)
from ipu_dynamo.capture.recurrent_dropout import separate_layers
from ipu_dynamo.capture.unplaceable import Unplaceable, UnplaceableError, find
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.markers import begin_block
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.options import Options
from ipu_dynamo.passes.joint.annotate_stages import write_stage
from ipu_dynamo.passes.pipeline import lone_pipeline, lower, placed_pipeline, run
from ipu_dynamo.passes.traced.placement import plan
from ipu_dynamo.program import Program
from ipu_dynamo.program_history import remember
from ipu_dynamo.runtime.engines.engines import Engine, make_engine
from ipu_dynamo.runtime.execute.bind_graph import Boxed, bind
from ipu_dynamo.torch_compile.backend_options import BackendOptions
from ipu_dynamo.torch_compile.compile_micro_batched import MicroBatches
from ipu_dynamo.torch_compile.notices import (
    break_reason,
    tell_of_break,
    tell_of_new_shape,
    tell_of_swallowed_errors,
)

log = logging.getLogger("ipu_dynamo.program")


@dataclass
class Record:
    """What was decided for a graph; `blocks` counts operators by block, stage and IPU."""

    operators: list[fx.Node] = field(default_factory=list)
    ended_by: tuple[str, str] | None = None
    unplaceable: tuple[Unplaceable, ...] = ()
    engine: str = ""
    blocks: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    passes: dict[str, list[str]] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)


def compile_region(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    options: BackendOptions,
    record: Record | None = None,
) -> Callable[..., Any]:
    """Compile Dynamo's graph; blocks in it become stages.

    Args:
        record: gets what is decided, to be explained.

    Returns:
        A callable on the graph's inputs that autograd can differentiate.
    """
    if aot_cache_forced():
        raise CompileError(
            "PyTorch asks for its own cache of compiled passes, which does not know stages",
            hint="leave out aot_compile and torch._functorch.config.force_autograd_cache",
        )
    with compile_lock():  # Dynamo holds it, other callers of a backend may not
        return _compile_alone(gm, examples, options, Record() if record is None else record)


def _compile_alone(
    gm: fx.GraphModule, examples: Sequence[Any], options: BackendOptions, record: Record
) -> Callable[..., Any]:
    tell_of_swallowed_errors()
    markers = read_markers(gm)
    operators = (node for node in gm.graph.nodes if node.op.startswith("call"))
    record.operators = [node for node in operators if node not in markers]
    record.ended_by = break_reason(gm)
    if options.fallback != "allow":
        tell_of_break(gm, markers)
    if found := find(gm, examples):
        return _fall_back(gm, options, UnplaceableError(found), record)
    remove_idle_dropout(gm)
    separate_layers(gm)
    specialise(gm, examples)
    tell_of_new_shape(gm, examples)
    engine = make_engine(options.core().stage_engine)
    record.engine = engine.name
    region = _Region(
        roles=describe_inputs(gm, examples),
        ipus=_place(gm, options.core(), record),
        options=options,
        engine=engine,
        micro_batches=MicroBatches(options, engine) if options.micro_batches > 1 else None,
        record=record,
    )
    try:
        return compile_passes(
            gm,
            examples,
            forward=partial(region.compile, kind="forward"),
            backward=partial(region.compile, kind="backward"),
            inference=partial(region.compile, kind="inference"),
            recompute=engine.name != "eager",
        )
    except UnplaceableError as error:
        return _fall_back(gm, options, error, record)


def _fall_back(
    gm: fx.GraphModule, options: BackendOptions, error: UnplaceableError, record: Record
) -> Callable[..., Any]:
    """Let PyTorch run a graph that cannot be placed, if the user wants that."""
    record.unplaceable = error.found
    if options.fallback == "error":
        raise error
    if options.fallback == "warn":
        warnings.warn(f"PyTorch runs a graph itself: {error}", stacklevel=2)
    return gm.forward


@dataclass
class _Region:
    """What the passes of one region share, forward compiled first.

    Args:
        roles: of the inputs of Dynamo's graph.
        ipus: of each stage.
        seen: roles of the forward graph's placeholders, by node name.
        homes: where the forward program keeps its variables.
    """

    roles: list[Placeholder]
    ipus: dict[int, int]
    options: BackendOptions
    engine: Engine
    micro_batches: MicroBatches | None
    record: Record
    seen: dict[str, Placeholder] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)

    def compile(
        self,
        graph: fx.GraphModule,
        examples: Sequence[Any],
        *,
        kind: Literal["forward", "backward", "inference"],
    ) -> Boxed:
        """Make the program of one flat graph, and a callable of that."""
        allow_retain_graph()
        with outside_tracing():
            descriptions = graph.graph.output_node().meta.get("desc", ())
            flat = read_pass(graph, self.roles, self.seen)
            capture = flat.capture
            capture.ipus, capture.homes = self.ipus, self.homes
            capture.alone = None if kind == "inference" else kind
            self.seen |= {node.name: role for node, role in capture.roles().items()}
            acted = self.record.passes.setdefault(kind, [])
            if self.micro_batches is None:
                core = self.options.core()
                program = lower(capture, core, passes=lone_pipeline(core), acted=acted)
                programs = [program]
                boxed = bind(program, self.engine, flat.arguments, flat.constants, flat.results)
            else:
                acted += run(placed_pipeline(), capture)
                boxed, programs = self.micro_batches.compile(flat, descriptions, self.homes, acted)
            for program in programs:
                self.homes |= {variable.name: variable.ipu for variable in program.variables}
                self.record.programs.append(program)
                remember(program)
                log.debug("%s", program)
        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed


def _place(gm: fx.GraphModule, options: Options, record: Record) -> dict[int, int]:
    """Write stages to Dynamo's nodes, remove the markers; return the IPU of each stage."""
    placed = plan(gm.graph, options.strategy)
    block = "before all blocks"
    for node in gm.graph.nodes:
        if node.target is begin_block:
            name = str(node.args[0])
            block = f"{name!r}" if name and not name.startswith("#") else "without a name"
        elif node in placed.stages:
            stage = placed.stages[node]
            record.blocks[block, stage, placed.ipus[stage]] += 1
    for node, stage in placed.stages.items():
        write_stage(node, stage)
        for inner in _graphs_in(gm, node):
            for child in inner.graph.nodes:
                write_stage(child, stage)
    for marker in placed.markers:
        gm.graph.erase_node(marker)
    gm.recompile()
    return dict(placed.ipus)


def _graphs_in(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator such as a checkpoint runs, with those in them."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    held = [gm.get_submodule(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    return [
        module for outer in held for module in outer.modules() if isinstance(module, fx.GraphModule)
    ]
