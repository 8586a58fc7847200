"""Turn block markers into stages, and stages into IPUs.

With     strategy=Strategy("pipelined", weights_on_one_ipu=True), micro_batches=3
Before   %w: f32[n,k] = parameter
         %m: f32[n,k] = buffer
         ipu.begin_block("encoder", 0)
         %h = aten.linear(%x: f32[4,k], aten.add(%w, %m))
         ipu.end_block()
         ipu.begin_block("head", 1)
         ipu.write_at_step_end(%m, aten.lerp(%m, %w, 0.1))
         %y = aten.relu(%h)
         ipu.end_block()
         return (%y,)
After    %h = aten.linear(%x, aten.add(%w, %m))             in stage 0
         ipu.write_at_step_end(%m, aten.lerp(%m, %w, 0.1))  in stage 0  # stage 0 alone reads %m, %w
         %y = aten.relu(%h)                                 in stage 1
         capture.ipus = {0: 0, 1: 1}
Keeps    every operator and its order. Variables are the same all through a step, so a write at its
         end may run on the stage that reads its sources.
Source   PopTorch user guide, "Annotation tools" and "Parallel execution strategies". The operator
         ExpMovAvg of published programs for PopTorch runs after the pipeline: a block around its
         call says where a layer is. A hook of that layer which computes its weight
         (`weight_norm`) runs before the block begins, on the IPU before.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from ipu_dynamo.capture.capture import STAGE, Traced
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.marks.markers import begin_block, end_block
from ipu_dynamo.ops.marks.step_end import write_at_step_end_op
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.ops.private.node_meta import EXAMPLE_VALUE
from ipu_dynamo.options import Strategy
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.passes.traced.stages.block_places import BlockStages
from ipu_dynamo.program.schedule.phases import PhaseNumbers
from ipu_dynamo.program.schedule.pipeline_orders import joins_last, misfit, order_of

# The sort key of stages: number of stage or phase (0 when sharded), and how often the IPU changed
# before (0 in a pipeline).
Rank = tuple[int, int]


class PipelineSizeError(CompileError):
    """Too few micro-batches to fill the pipeline.

    Args:
        stages: forward stages of the model.
        required: the least number of micro-batches.
        given: the number that the options ask for.
        training: accumulated micro-batches count, else device iterations.
        num_ipus: IPUs that the model wants.
    """

    id = "pipeline"

    def __init__(
        self, *, stages: int, required: int, given: int, training: bool, num_ipus: int
    ) -> None:
        what = "gradient_accumulation" if training else "device_iterations"
        super().__init__(
            f"a pipeline of {stages} stages needs at least {required} micro-batches, got {given}",
            hint=f"set {what} to {required} or more, or use a sharded strategy",
        )
        self.stages, self.required, self.training = stages, required, training
        self.num_ipus = num_ipus


@dataclass(frozen=True, slots=True)
class Placed:
    """The decision: a stage for every operator, an IPU for every stage, markers to remove.

    `phases` has the phase of every stage, from 0; it is empty unless the strategy is phased.
    """

    stages: dict[fx.Node, int]
    ipus: dict[int, int]
    phases: dict[int, int]
    markers: tuple[fx.Node, ...]
    pipeline_stages: int


def plan(graph: fx.Graph, strategy: Strategy, variables: Collection[fx.Node] = ()) -> Placed:
    """Decide where every operator runs. Reads the graph, changes nothing.

    Args:
        variables: parameters and buffers that operators of one IPU may read.
    """
    blocks = BlockStages(strategy)
    sizes = _Sizes()
    ranks: dict[fx.Node, Rank] = {}
    ipus: dict[Rank, int] = {(0, 0): 0}
    markers: list[fx.Node] = []
    current: Rank | None = (0, 0)
    for node in graph.nodes:
        if node.target is begin_block:
            markers.append(node)
            if len(markers) == 1 and ranks:
                blocks.first_number = 1
            number, ipu = blocks.begin(node)
            sizes.begin(ipu)
            current = (
                0 if strategy.kind == "sharded" else number,
                0 if strategy.kind == "pipelined" else sizes.visits,
            )
            if not ranks:
                ipus.pop((0, 0), None)
            if ipus.setdefault(current, ipu) != ipu:
                raise CompileError(
                    f"block {node.args[0]!r} on IPU {ipu} and earlier blocks on IPU "
                    f"{ipus[current]} have the same pipeline stage {number}, but different "
                    f"virtual graph ids",
                    node=node,
                    hint="give blocks of one stage one IPU, or use AutoStage.AutoIncrement",
                    id="block",
                )
        elif node.target is end_block:
            markers.append(node)
            current = None
        elif computes(node):
            if current is None:
                raise CompileError(
                    "No active Block, all the ops must belong to a Block",
                    node=node,
                    hint="begin another block before this operator",
                    id="block",
                )
            ranks[node] = current
        elif node.target is getitem and node.args[0] in ranks:
            ranks[node] = ranks[node.args[0]]
    ranks |= _ranks_of_step_end(graph, ranks, ipus, variables)
    if strategy.kind != "sharded":
        _check_order(ranks, "phase" if strategy.phased else "pipeline stage")
    order = sorted(set(ranks.values())) or [(0, 0)]
    if strategy.keep_stages:
        _check_used(order, strategy)
    dense = _merge(order, ipus, separate=strategy.phased or strategy.keeps_apart)
    return Placed(
        stages={node: dense[rank] for node, rank in ranks.items()},
        ipus={dense[rank]: ipus.get(rank, 0) for rank in order},
        phases={dense[rank]: rank[0] for rank in order} if strategy.phased else {},
        markers=tuple(markers),
        pipeline_stages=len(strategy.stages) if strategy.keep_stages else sizes.visits + 1,
    )


@dataclass
class _Sizes:
    """How often the IPU has changed from block to block, beginning with IPU 0."""

    visits: int = 0
    ipu: int = 0

    def begin(self, ipu: int) -> None:
        self.visits += ipu != self.ipu
        self.ipu = ipu


def pipeline_stages(graph: fx.Graph, strategy: Strategy) -> int:
    """Forward stages of the pipeline that `graph` would be. Reads the graph, changes nothing."""
    if strategy.ipus is not None:
        return strategy.ipus
    if strategy.keep_stages:
        return len(strategy.stages)
    blocks, sizes = BlockStages(strategy), _Sizes()
    for marker in graph.find_nodes(op="call_function", target=begin_block):
        sizes.begin(blocks.begin(marker).ipu)
    return sizes.visits + 1


def apply(capture: Traced, placed: Placed, strategy: Strategy) -> None:
    """Write the stages to the nodes and remove the markers."""
    for node, stage in placed.stages.items():
        node.meta[STAGE] = stage
    for marker in placed.markers:
        capture.graph.graph.erase_node(marker)
    capture.ipus = dict(placed.ipus)
    capture.keeps_stages = strategy.keep_stages
    if placed.phases:
        numbers = PhaseNumbers.of(strategy)
        capture.phases = {
            stage: (numbers.forward(phase), numbers.backward(phase))
            for stage, phase in placed.phases.items()
        }


class Placement(GraphPass):
    """The pass.

    Args:
        micro_batches: that run per update (training) or per call (inference). None: the graph is
            one of Dynamo's, and the check is done when it is split.
    """

    level = "traced"
    needed = "every operator has to have a stage, and block markers compute nothing"

    strategy: Strategy
    micro_batches: int | None

    def rewrite(self, capture: Traced) -> bool:
        if any(STAGE in node.meta for node in capture.graph.graph.nodes):
            return False
        one_ipu = self.strategy.kind == "pipelined" and self.strategy.weights_on_one_ipu
        one_ipu = one_ipu and self.micro_batches is not None
        placed = plan(capture.graph.graph, self.strategy, _variables(capture) if one_ipu else ())
        if self.strategy.kind == "pipelined" and self.micro_batches is not None:
            num_ipus = max(placed.ipus.values()) + 1
            if not (capture.training and self.strategy.order_name):
                check_size(placed.pipeline_stages, num_ipus, self.micro_batches, capture.training)
        apply(capture, placed, self.strategy)
        if self.micro_batches is not None:
            prepare_order(capture, self.strategy, self.micro_batches)
        if one_ipu:
            _check_weights(capture)
        return True


def prepare_order(capture: Traced, strategy: Strategy, micro_batches: int) -> None:
    """Check that stages fit a schedule by name, and whether it does both last passes at once.

    Raises:
        CompileError: they do not.
    """
    name, ipus = strategy.order_name, [ipu for _, ipu in sorted(capture.ipus.items())]
    if not (name and capture.training):
        return
    if (against := misfit(name, ipus, micro_batches)) is not None:
        problem, hint = against
        raise CompileError(problem, hint=hint, id="pipeline")
    order = order_of(name, ipus, micro_batches)
    capture.separate_last = len(set(ipus)) > 1 and not joins_last(order, len(ipus))


def check_size(stages: int, num_ipus: int, micro_batches: int, training: bool) -> None:
    """Raise unless there are micro-batches enough to fill a pipeline.

    Raises:
        PipelineSizeError: there are not.
    """
    required = 2 * stages - 1 if training else stages
    if micro_batches < required:
        raise PipelineSizeError(
            stages=stages,
            required=required,
            given=micro_batches,
            training=training,
            num_ipus=num_ipus,
        )


def computes(node: fx.Node) -> bool:
    """Whether a node is an operator, or a call with tensor results in one of Dynamo's graphs.

    Switches of modes are neither.
    """
    if isinstance(node.target, OpOverload):
        return True
    if node.target is getitem and not isinstance(_example(node.args[0]), torch.Tensor):
        return False  # takes a result out of a tuple
    return node.op in ("call_function", "call_method") and _gives_tensor(node)


def _gives_tensor(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph has a tensor, or a tuple with one, as its value."""
    value = _example(node)
    return isinstance(value, torch.Tensor) or (
        isinstance(value, tuple | list) and any(isinstance(v, torch.Tensor) for v in value)
    )


def _example(node: object) -> object:
    return node.meta.get(EXAMPLE_VALUE) if isinstance(node, fx.Node) else None


def _merge(order: list[Rank], ipus: dict[Rank, int], *, separate: bool) -> dict[Rank, int]:
    """Number the used stages from 0; neighbours on one IPU are one, unless kept `separate`."""
    dense: dict[Rank, int] = {}
    last: Rank | None = None
    for rank in order:
        same = last is not None and ipus[last] == ipus[rank]
        same = same and not (separate and last is not None and last[0] != rank[0])
        dense[rank] = len(set(dense.values())) - (1 if same else 0)
        last = rank
    return dense


def _check_used(order: list[Rank], strategy: Strategy) -> None:
    """Raise when a stage that is to be kept has no operator."""
    used = {number for number, _ in order}
    for number, stage in enumerate(strategy.stages):
        if number not in used:
            raise CompileError(
                f"stage {number} has no operators; its blocks are {list(stage.blocks)}",
                hint="leave the stage out, or leave keep_stages out",
                id="block",
            )


def _check_order(ranks: dict[fx.Node, Rank], what: str) -> None:
    """Raise when an operator reads the result of a later stage, or of a later phase."""
    for node, (number, _) in ranks.items():
        for source in node.all_input_nodes:
            if source in ranks and ranks[source][0] > number:
                raise CompileError(
                    f"{what} {number} reads %{source.name}, a result of the later "
                    f"{what.split()[-1]} {ranks[source][0]}",
                    node=node,
                    hint=f"number {what}s along the data flow"
                    + (" (AutoStage.AutoIncrement)" if what == "pipeline stage" else "")
                    + ", or use ShardedExecution",
                    id="block",
                )


def _ranks_of_step_end(
    graph: fx.Graph,
    ranks: Mapping[fx.Node, Rank],
    ipus: Mapping[Rank, int],
    variables: Collection[fx.Node],
) -> dict[fx.Node, Rank]:
    """New ranks for operators that serve writes at the end of a step alone. Reads the graph only.

    A write stays where it is if one of its sources comes from another stage, or is a variable that
    several IPUs read, or that nothing else reads.

    Args:
        ranks: of all operators; earlier ones are less.
        ipus: of each rank.
        variables: parameters and buffers, which one IPU may read.
    """
    serving = {
        write: _serving(write, ranks)
        for write in graph.find_nodes(op="call_function", target=write_at_step_end_op)
    }
    all_serving = {node for nodes in serving.values() for node in nodes}
    moved: dict[fx.Node, Rank] = {}
    for nodes in serving.values():
        sources = {source for node in nodes for source in node.all_input_nodes} - nodes
        if any(source.op not in ("placeholder", "get_attr") for source in sources):
            continue
        readers = [user for v in sources & set(variables) for user in v.users]
        places = [ranks[r] for r in readers if r in ranks and r not in all_serving]
        if len({ipus[rank] for rank in places}) == 1:
            moved |= dict.fromkeys(nodes, min(places))
    return moved


def _serving(write: fx.Node, ranks: Collection[fx.Node]) -> set[fx.Node]:
    """The write, and the operators whose results it alone reads."""
    nodes, waiting = {write}, list(write.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in ranks and node not in nodes and nodes.issuperset(node.users):
            nodes.add(node)
            waiting += node.all_input_nodes
    return nodes


def _variables(capture: Traced) -> list[fx.Node]:
    roles = capture.roles().items()
    return [node for node, role in roles if role.kind in ("parameter", "buffer")]


def _check_weights(capture: Traced) -> None:
    """Raise when two IPUs of a pipeline read one parameter or buffer."""
    roles = capture.roles()
    for node in _variables(capture):
        readers = {
            capture.ipus[user.meta[STAGE]]: user for user in node.users if STAGE in user.meta
        }
        if len(readers) > 1:
            raise CompileError(
                f"Can not copy variable tensor {roles[node].name} between virtual graphs when "
                f"pipelining. All pipeline stages using this tensor should be on the same "
                f"graph. It is read on IPUs {sorted(readers)}",
                node=readers[max(readers)],
                hint="put the layers that share it on one IPU",
                id="block",
            )
