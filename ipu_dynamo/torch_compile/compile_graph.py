"""Compile a graph that Dynamo captured: place its blocks, differentiate it, make its programs."""

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import fx

from ipu_dynamo import noted_warnings, program_history
from ipu_dynamo.capture.capture import STAGE, Placeholder
from ipu_dynamo.capture.dynamo import (
    describe_call,
    describe_graph,
    note_modules,
    open_pass,
    root_class,
    specialise,
)
from ipu_dynamo.capture.private.aot import (
    Cutting,
    allow_retain_graph,
    aot_cache_forced,
    compile_passes,
    outside_tracing,
    taking_list,
)
from ipu_dynamo.capture.private.dynamo import RestartAnalysis, compile_count
from ipu_dynamo.capture.unplaceable import UnplaceableError, find
from ipu_dynamo.errors import NO_LINE, CompileError, source_line
from ipu_dynamo.inspection.graph_entry import looked_at
from ipu_dynamo.memory_limit import enforce_memory
from ipu_dynamo.ops.marks.markers import begin_block
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.ops.private.node_meta import DESC
from ipu_dynamo.options import Options
from ipu_dynamo.passes.graph.extract import copied
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Directions
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.pipeline import (
    aot_passes,
    captured_passes,
    cutting_passes,
    flat_passes,
    host_passes,
    left_out,
    lower,
    numeric_passes,
    placed_passes,
    placement_passes,
    run_host_passes,
)
from ipu_dynamo.passes.traced.stages.read_block_markers import markers_of
from ipu_dynamo.progress import begin, job
from ipu_dynamo.runtime.engines.engines import Engine, make_engine
from ipu_dynamo.runtime.execute.reentrant import Boxed, bind
from ipu_dynamo.torch_compile import notices
from ipu_dynamo.torch_compile.backend_options import BackendOptions
from ipu_dynamo.torch_compile.changed_inputs import apart_or_plain, places_of_changed
from ipu_dynamo.torch_compile.compile_micro_batched import MicroBatches
from ipu_dynamo.torch_compile.dynamo_errors import readable
from ipu_dynamo.torch_compile.graph_record import GraphRecord
from ipu_dynamo.torch_compile.late_results import LateResults, late_results, making_results
from ipu_dynamo.torch_compile.notices import (
    break_reason,
    tell_of_break,
    tell_of_new_shape,
    tell_of_swallowed_errors,
)

log = logging.getLogger("ipu_dynamo.program")


def compile_readably(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    options: object,
    mode: str | None = None,
    record: GraphRecord | None = None,
) -> Callable[..., Any]:
    """Compile a graph; raise each failure as an error that Dynamo shows unchanged.

    Args:
        options: as users give them.
        record: to note decisions in; `inspect` finds it by the returned function.
    """
    record = GraphRecord() if record is None else record
    try:
        record.given, record.options = options, BackendOptions.read(options, mode)
        with noted_warnings.noting() as record.warned:
            run = _compile_graph(gm, examples, record.options, record)
        return looked_at(run, record.entry)
    except RestartAnalysis:
        raise  # how Dynamo is asked to capture the frame once more
    except Exception as error:  # some kinds would make Dynamo run the frame elsewhere, silently
        raise readable(error, inspect.currentframe()) from error


def forget_compiled() -> None:
    """Clear all compiled code; `torch._dynamo.reset()` calls this for each model."""
    program_history.forget()
    notices.forget()
    if stages := sys.modules.get(
        "ipu_dynamo.runtime.engines.compiled_stages"
    ):  # not without Inductor
        stages.forget()


compile_readably.reset = forget_compiled  # type: ignore[attr-defined]


def _compile_graph(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    options: BackendOptions,
    record: GraphRecord,
) -> Callable[..., Any]:
    """Compile Dynamo's graph; blocks in it become stages.

    Returns:
        A callable on the graph's inputs that autograd can differentiate.
    """
    if aot_cache_forced():
        raise CompileError(
            "PyTorch asks for its own cache of compiled passes, which does not know stages",
            hint="leave out aot_compile and torch._functorch.config.force_autograd_cache",
        )
    # Dynamo holds it, other callers of a backend may not
    with compile_lock(), job(_title(gm), show=options.progress):
        return _compile_alone(gm, examples, options, record)


def _compile_alone(
    gm: fx.GraphModule, examples: Sequence[Any], options: BackendOptions, record: GraphRecord
) -> Callable[..., Any]:
    tell_of_swallowed_errors()
    left_out((), options.core())  # raises for wrong names before any graph is read
    note_modules(gm)
    plain = _copied(gm)  # passes rewrite the other one
    captured = describe_graph(gm, examples)
    record.root, held = root_class(gm), captured.report.tensors
    record.shapes = {
        role.name: tuple(map(int, held[role.name].shape))
        for role in captured.placeholders
        if role.kind != "input"
    }
    manager = PassManager("captured", first="captured", runs=record.runs_of("captured"))
    manager.run(captured_passes(), captured)
    markers = markers_of(gm.graph)
    operators = (node for node in gm.graph.nodes if node.op.startswith("call"))
    record.operators = [node for node in operators if node not in markers]
    record.ended_by = break_reason(gm)
    if options.fallback != "allow":
        tell_of_break(gm, markers)
    if unplaceable := find(gm, examples):
        return _fall_back(plain, options, UnplaceableError(unplaceable), record)
    specialise(gm, examples)
    tell_of_new_shape(gm, examples)
    blocks = _block_names(gm)
    manager.run(placement_passes(options.core()), captured)
    for node in gm.graph.nodes:
        if STAGE in node.meta:
            stage = node.meta[STAGE]
            record.blocks[blocks[node], stage, captured.ipus[stage]] += 1
    engine = make_engine(options.core().stage_engine, options.check_compiled)
    record.engine = engine.name
    programs = _GraphPrograms(
        number="{}/{}".format(*compile_count(gm)),
        roles=list(captured.placeholders),
        ipus=dict(captured.ipus),
        options=options,
        engine=engine,
        micro_batches=MicroBatches(options, engine) if options.micro_batches > 1 else None,
        record=record,
    )
    begin("tracing")
    try:
        run = compile_passes(
            gm,
            examples,
            joint=programs.split,
            forward=partial(programs.compile, kind="forward"),
            backward=partial(programs.compile, kind="backward"),
            inference=partial(programs.compile, kind="inference"),
        )
    except UnplaceableError as error:
        return _fall_back(plain, options, error, record)
    if not programs.changed:
        return run
    names = [role.name for role in programs.roles]
    return apart_or_plain(run, plain.forward, programs.changed, names)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph and the bodies in it, with the tensors of the original."""
    copy = fx.GraphModule(gm, copied(gm.graph)[0])
    for name, body in copy.named_children():
        if isinstance(body, fx.GraphModule):
            setattr(copy, name, _copied(body))
    return copy


def _fall_back(
    plain: fx.GraphModule, options: BackendOptions, error: UnplaceableError, record: GraphRecord
) -> Callable[..., Any]:
    """Let PyTorch run the user's graph if it cannot be placed, and the user wants that."""
    record.unplaceable = error.found
    if options.fallback == "error":
        raise error
    if options.fallback == "warn":
        noted_warnings.warn(f"PyTorch runs a graph itself: {error}")
    return plain.forward


@dataclass
class _GraphPrograms:
    """The state that forward and backward of one graph share; forward is compiled first.

    Args:
        number: which frame Dynamo has captured, and how often before, as `0/1`.
        roles: of the inputs of Dynamo's graph.
        ipus: of each stage.
        seen: roles of the forward graph's placeholders, by node name.
        owners: where the forward program keeps its variables.
        done: passes that ran on the joint graph.
        late: results of forward that are made when its program has run.
        changed: places of the inputs that the graph changes.
    """

    number: str
    roles: list[Placeholder]
    ipus: dict[int, int]
    options: BackendOptions
    engine: Engine
    micro_batches: MicroBatches | None
    record: GraphRecord
    seen: dict[str, Placeholder] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    late: LateResults = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)

    def split(
        self, graph: fx.GraphModule, results: int, lasting: Sequence[int]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Rewrite the joint graph, and cut it into a forward and a backward one.

        Args:
            results: how many of its results are forward's.
            lasting: which inputs are the same tensors in every call.
        """
        core = self.options.core()
        self.late = late_results(graph)
        manager = PassManager("joint", first="joint", runs=self.record.runs_of("joint"))
        with outside_tracing():
            capture = open_pass(graph, self.roles, {}, self.ipus).capture
            manager.run(self._aot_passes(core), capture)
        cutting: Cutting = "minimum" if self.options.recomputes else "none"
        steps = cutting_passes(core, cutting, results, lasting)
        directions = manager.run(steps, capture)
        assert isinstance(directions, Directions), "the last pass cuts"
        self.done = manager.done
        return directions.forward, directions.backward

    def _aot_passes(self, core: Options) -> list[Pass]:
        return aot_passes(core, micro_batches=self.micro_batches is not None)

    def compile(
        self,
        graph: fx.GraphModule,
        examples: Sequence[Any],
        *,
        kind: Literal["forward", "backward", "inference"],
    ) -> Boxed:
        """Make the program of one flat graph, and a callable of that."""
        allow_retain_graph()
        if kind != "backward":
            self.changed = places_of_changed(graph.graph)
        title = f"compiling the {kind} pass"  # by itself if autograd asks for it later
        with job(title, show=self.options.progress), outside_tracing():
            descriptions = graph.graph.output_node().meta.get(DESC, ())
            alone = None if kind == "inference" else kind
            core = self.options.core()
            flat = open_pass(graph, self.roles, self.seen, self.ipus, alone)
            capture = flat.capture
            title = f"graph {self.number} {kind}"
            manager = PassManager(
                kind, first="flat", runs=self.record.runs_of(kind), done=set(self.done)
            )
            if kind == "inference":
                self.late = late_results(graph)
                manager.run(self._aot_passes(core), capture)
            manager.run(flat_passes(core), capture)
            describe_call(flat)
            self.seen |= {node.name: role for node, role in capture.roles().items()}
            manager.run(placed_passes(core), capture)
            if self.micro_batches is None:
                program = lower(capture, numeric_passes(core, self.owners), manager)
                machine = Machine(self.engine.name)
                host = run_host_passes(program, host_passes(core, machine), manager)
                bound = [
                    bind(host, self.engine, flat.arguments, flat.constants, flat.results, title)
                ]
                boxed = bound[0].run
            else:
                boxed, bound = self.micro_batches.compile(
                    flat, descriptions, self.owners, manager, title
                )
            self.record.programs += bound
            for one in bound:
                program = one.host.program
                self.owners |= {variable.name: variable.ipu for variable in program.variables}
                program_history.remember(one.host, one.plan)
                enforce_memory(program, self.options.enforce_memory)
                log.debug("%s", program)
        if self.late and kind != "backward":
            boxed = making_results(boxed, self.late)
        return taking_list(boxed)


def _title(gm: fx.GraphModule) -> str:
    """The title of a compilation, with the first line of the user's code in the graph."""
    for node in gm.graph.nodes:
        if node.op.startswith("call") and (line := source_line(node)) != NO_LINE:
            return f"compiling {line.partition(': ')[0] if ' in ' in line else line}"
    return "compiling a graph"


def _block_names(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """The block that each node is in, while the graph has markers."""
    names: dict[fx.Node, str] = {}
    block = "before all blocks"
    for node in gm.graph.nodes:
        if node.target is begin_block:
            name = str(node.args[0])
            block = f"{name!r}" if name and not name.startswith("#") else "without a name"
        names[node] = block
    return names
