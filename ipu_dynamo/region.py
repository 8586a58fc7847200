"""Compile a region that Dynamo captured: place its blocks, differentiate it, make its programs."""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx

from ipu_dynamo.capture.capture import Placeholder
from ipu_dynamo.capture.dynamo import (
    describe_inputs,
    last_block,
    read_markers,
    read_pass,
    specialise,
)
from ipu_dynamo.capture.torch_private import (
    aot_cache_forced,
    compile_passes,
    mkldnn_enabled,
    outside_tracing,
)
from ipu_dynamo.errors import CompileError
from ipu_dynamo.options import OptionError, Options
from ipu_dynamo.passes.carry_stages import write_stage
from ipu_dynamo.passes.pipeline import lone_pipeline, lower
from ipu_dynamo.passes.placement import plan
from ipu_dynamo.recent import remember
from ipu_dynamo.runtime.engines import Engine, make_engine
from ipu_dynamo.runtime.region import Boxed, bind

log = logging.getLogger("ipu_dynamo.program")
_ACCEPTED = ("engine", "strategy")


def read_options(given: Options | dict[str, Any] | None, mode: str | None) -> Options:
    """The options of one `torch.compile` call.

    Raises:
        OptionError: an option does not exist, or says how a whole training step runs.
    """
    if mode is not None:
        raise OptionError(
            f"backend 'ipu' was reached with mode={mode!r}, and it has no modes; leave mode out, "
            f"or choose another backend"
        )
    options, default = Options.read(given), Options()
    for name in (f.name for f in fields(Options)):
        if name not in _ACCEPTED and getattr(options, name) != getattr(default, name):
            raise OptionError(
                f"option {name} has no meaning for torch.compile, which calls the model batch by "
                f"batch and leaves the update to your optimiser; it takes "
                f"{' and '.join(_ACCEPTED)}; ipu_dynamo.compile_training takes all options"
            )
    if options.strategy.kind == "pipelined":
        raise OptionError(
            "option strategy is pipelined, but torch.compile does not split a batch into the "
            "micro-batches that a pipeline needs; use a sharded strategy, or "
            "ipu_dynamo.compile_training with gradient_accumulation"
        )
    if options.strategy.phased:
        raise OptionError(
            f"option strategy is {options.strategy.kind}, but torch.compile keeps between forward "
            "and backward what it wants; use a sharded strategy, or ipu_dynamo.compile_training"
        )
    return options


def compile_region(
    gm: fx.GraphModule, examples: Sequence[Any], options: Options
) -> Callable[..., Any]:
    """Compile Dynamo's graph; blocks in it become stages, one after the other.

    Returns:
        A callable on the graph's inputs that autograd can differentiate.
    """
    if aot_cache_forced():
        raise CompileError(
            "PyTorch asks for its own cache of compiled passes, which does not know stages",
            hint="leave out aot_compile and torch._functorch.config.force_autograd_cache",
        )
    specialise(gm, examples)
    markers = read_markers(gm)
    _warn_of_break(gm, markers)
    engine = make_engine(options.stage_engine)
    region = _Region(
        roles=describe_inputs(gm, examples),
        ipus=_place(gm, options),
        options=options,
        engine=engine,
        mkldnn=mkldnn_enabled(),
    )
    return compile_passes(
        gm,
        examples,
        forward=partial(region.compile, kind="forward"),
        backward=partial(region.compile, kind="backward"),
        inference=partial(region.compile, kind="inference"),
        recompute=engine.name != "eager",
    )


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
    options: Options
    engine: Engine
    mkldnn: bool
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
        with outside_tracing(mkldnn=self.mkldnn):
            flat = read_pass(graph, self.roles, self.seen)
            capture = flat.capture
            capture.ipus, capture.homes = self.ipus, self.homes
            capture.alone = None if kind == "inference" else kind
            self.seen |= {node.name: role for node, role in capture.roles().items()}
            program = lower(capture, self.options, passes=lone_pipeline(self.options))
            self.homes |= {variable.name: variable.ipu for variable in program.variables}
            remember(program)
            log.debug("%s", program)
            boxed = bind(program, self.engine, flat.arguments, flat.constants, flat.results)
        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed


def _place(gm: fx.GraphModule, options: Options) -> dict[int, int]:
    """Write stages to Dynamo's nodes, remove the markers; return the IPU of each stage."""
    placed = plan(gm.graph, options.strategy)
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


def _warn_of_break(gm: fx.GraphModule, markers: Sequence[fx.Node]) -> None:
    """Say so when a block does not reach over a graph break as its author may expect."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    block = last_block(markers)
    if reason is None or not reason.graph_break or block is None:
        return
    frame = reason.user_stack[-1] if reason.user_stack else None
    line = f"{Path(frame.filename).name}:{frame.lineno}" if frame else "an unknown line"
    why = str(reason.reason).partition("\n")[0]
    warnings.warn(
        f"PyTorch breaks the graph at {line} ({why}). The block that begins at {block} ends "
        f"there: what follows is another program, and it starts on IPU 0. Compile with "
        f"fullgraph=True to see the reason in full.",
        stacklevel=2,
    )
