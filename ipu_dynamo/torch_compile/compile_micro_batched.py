"""Make the programs of a flat graph that runs on micro-batches, and a call of them in order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from torch import Tensor, fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.capture.dynamo import FlatPass
from ipu_dynamo.capture.private.aot import TangentAOTInput
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.private.node_meta import DESC, SEQ_NR
from ipu_dynamo.passes.host.machine import Machine
from ipu_dynamo.passes.levels import BatchPieces
from ipu_dynamo.passes.manager import PassManager
from ipu_dynamo.passes.micro_batch.placements import Kind, Piece, Placement, Shard
from ipu_dynamo.passes.micro_batch.split_batch import SplitBatch
from ipu_dynamo.passes.pipeline import (
    host_passes,
    loop_passes,
    lower,
    numeric_passes,
    run_host_passes,
    split_passes,
)
from ipu_dynamo.program.ir.types import counted
from ipu_dynamo.runtime.engines.engines import Engine
from ipu_dynamo.runtime.execute.reentrant import BoundProgram, Boxed, bind, bind_loop
from ipu_dynamo.torch_compile.backend_options import BackendOptions
from ipu_dynamo.whole_step.worker_counts import workers_for


@dataclass
class MicroBatches:
    """Forward's decisions on its values, which backward follows.

    Args:
        values: placement of forward's arguments and results, by the name of their node.
        outputs: placement of forward's results, by AOTAutograd's description.
        deferred: `seq_nr` of the operators that forward runs after the micro-batches.
    """

    options: BackendOptions
    engine: Engine
    values: dict[str, Placement] = field(default_factory=dict)
    outputs: dict[object, Placement] = field(default_factory=dict)
    deferred: set[int] = field(default_factory=set)

    def compile(
        self,
        flat: FlatPass,
        descriptions: Sequence[object],
        known: Mapping[str, int],
        manager: PassManager,
        title: str,
    ) -> tuple[Boxed, list[BoundProgram]]:
        """Compile the pieces of a placed graph; return a callable and the programs.

        Args:
            descriptions: of each of its results, by AOTAutograd.
            known: IPUs of variables that another program has placed.
            manager: of the graph; records the passes on its pieces.
            title: of the calls, in traces.
        """
        capture, n = flat.capture, self.options.micro_batches
        backward = capture.alone == "backward"
        returned = [node.name for node in capture.returned if node is not None]
        named = self.options.batch_inputs
        seeds = self._known(capture) if backward else split_inputs(capture, n, named)
        by_name = {node.name: placement for node, placement in seeds.items()}
        numbered = capture.graph.graph.nodes if backward else ()
        deferred = tuple(x.name for x in numbered if x.meta.get(SEQ_NR) in self.deferred)
        made = manager.run(split_passes(SplitBatch(n, by_name, deferred)), capture)
        assert isinstance(made, BatchPieces), "CutBatch makes pieces"
        split, pieces, names = made.split, made.pieces, made.names
        placed = [split.of(node) for node in capture.returned if node is not None]
        if not backward:
            self.values |= {node.name: split.of(node) for node in capture.placeholder_nodes}
            self.values |= dict(zip(returned, placed, strict=True))
            later = (node for node, placement in split.at.items() if placement is Kind.DEFERRED)
            self.deferred |= {node.meta[SEQ_NR] for node in later if SEQ_NR in node.meta}
            for description, result in zip(descriptions, flat.results, strict=False):
                if isinstance(result, str) and result.isdigit() and int(result) < len(placed):
                    self.outputs[description] = placed[int(result)]
        bound, calls = [], []
        owners = dict(known)
        places = {name: i for i, name in enumerate(flat.arguments)}
        for piece in pieces:
            program = self._bind(piece, owners, manager, title)
            owners |= {v.name: v.ipu for v in program.host.program.variables}
            sources = [places[source] for source in piece.sources.values()]
            calls.append((_taker(sources), program.run))
            places |= {name: len(places) + i for i, name in enumerate(piece.results)}
            bound.append(program)
        kept: list[str | float | None] = [
            names[int(r)] if isinstance(r, str) and r not in flat.arguments else r
            for r in flat.results
        ]
        return _chained(calls, flat.constants, places, kept), bound

    def _known(self, capture: Joint) -> dict[fx.Node, Placement]:
        """Placements from the forward pass, of values and of the gradients of its results."""
        seeds: dict[fx.Node, Placement] = {}
        for node in capture.placeholder_nodes:
            placement = self.values.get(node.name)
            tangent = node.meta.get(DESC)
            if placement is None and isinstance(tangent, TangentAOTInput):
                placement = self.outputs.get(tangent.output)
            if isinstance(placement, Shard) or placement is Kind.PER_MICRO_BATCH:
                seeds[node] = placement
        return seeds

    def _bind(
        self, piece: Piece, owners: Mapping[str, int], manager: PassManager, title: str
    ) -> BoundProgram:
        n = self.options.micro_batches
        core = self.options.core()
        done, runs = set(manager.done), manager.runs
        machine = Machine(self.engine.name)
        manager = PassManager(_part(piece), first="piece", runs=runs, done=done)
        if not piece.joins:
            program = lower(piece.capture, numeric_passes(core, owners), manager)
            count = range(len(piece.results))
            host = run_host_passes(program, host_passes(core, machine), manager)
            results = [*map(str, count)]
            return bind(host, self.engine, [*piece.sources], (), results, title)
        core = replace(core, device_iterations=n)
        program = lower(piece.capture, loop_passes(core, piece, owners), manager)
        host = run_host_passes(program, host_passes(core, machine), manager)
        return bind_loop(
            host,
            self.engine,
            [*piece.sources],
            [join.like for join in piece.joins],
            workers=workers_for(host, core),
            title=title,
        )


def split_inputs(
    capture: Joint, n: int, named: Sequence[str] | None = None
) -> dict[fx.Node, Placement]:
    """The inputs that are cut along dim 0: those that are named, or all with several rows.

    Raises:
        CompileError: no input can be split, the batch size is not clear, or the rows do not divide
            evenly.
    """
    roles = capture.roles()
    inputs = {role.name: node for node, role in roles.items() if role.kind == "input"}
    shapes = {name: tuple(node.meta["val"].shape) for name, node in inputs.items()}
    rows = {name: shape[0] for name, shape in shapes.items() if shape}
    if unknown := sorted(set(named or ()) - set(rows)):
        raise CompileError(
            f"batch_inputs names {unknown[0]!r}, which is no input that has a dimension",
            hint=f"these are: {', '.join(rows) or 'none'}",
            id="micro-batches",
        )
    batch = {name: size for name, size in rows.items() if (name in named if named else size != 1)}
    if not batch:
        raise CompileError(
            "there is no batch to split: no input of the graph has several rows",
            hint="leave out micro_batches",
            id="micro-batches",
        )
    if len(set(batch.values())) > 1:
        sizes = ", ".join(f"{name} has {size}" for name, size in batch.items())
        raise CompileError(
            f"it is not clear what the batch is: dim 0 of the inputs differs ({sizes})",
            hint=f"name the inputs that are cut, for example batch_inputs={[next(iter(batch))]}",
            id="micro-batches",
        )
    size = next(iter(batch.values()))
    if size % n:
        raise CompileError(
            f"a batch of {counted(size, 'row')} (dim 0 of {', '.join(batch)}) does not divide into "
            f"{n} micro-batches",
            hint=f"pad it to a multiple of {n}, drop the last batch, or change micro_batches",
            id="micro-batches",
        )
    return {inputs[name]: Shard(0) for name in batch}


def _part(piece: Piece) -> str:
    kind = piece.capture.alone or "inference"
    return f"{kind}_{piece.phase}"


def _taker(places: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that takes the values at `places` out of a list."""
    if len(places) == 1:
        return lambda values: [values[places[0]]]
    if not places:
        return lambda values: []
    take = itemgetter(*places)
    return lambda values: list(take(values))


def _chained(
    calls: Sequence[tuple[Callable[..., list[Any]], Callable[[list[Any]], Sequence[Any]]]],
    constants: Sequence[Tensor],
    places: Mapping[str, int],
    results: Sequence[str | float | None],
) -> Boxed:
    """Call up to three programs in order; each can read the results of those before it.

    Args:
        calls: of each, a function that takes its arguments out of all values, and one that runs
            it. Its results join the values. The interpreter of programs runs each one.
        places: among the values: arguments, constants, and results in this order.
        results: the names of returned tensors; other values are returned unchanged.
    """
    take = _taker([places[r] for r in results if isinstance(r, str)])
    is_tensor = [isinstance(r, str) for r in results]

    def run(arguments: list[Any]) -> tuple[Any, ...]:
        values = [*arguments, *constants]
        arguments.clear()
        for pick, call in calls:
            values += call(pick(values))
        tensors = iter(take(values))
        return tuple(next(tensors) if t else r for t, r in zip(is_tensor, results, strict=True))

    return run
