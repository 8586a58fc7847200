"""Run a traced function whole and on micro-batches, with placements that are drawn."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_dynamo.capture.capture import STAGE, Joint, OutputRole, Placeholder
from ipu_dynamo.passes.micro_batch.cut_batch import cut
from ipu_dynamo.passes.micro_batch.placements import Kind, Piece, Placement, Shard, Split
from ipu_dynamo.passes.micro_batch.prepare_batch import PrepareBatch
from ipu_dynamo.passes.micro_batch.split_batch import plan
from ipu_dynamo.program.ir.values import blocks


def traced(call: Callable[..., Any], tensors: Sequence[Tensor]) -> Joint:
    """The flat graph of a call, as a capture of which every tensor is an input."""
    gm = make_fx(call, tracing_mode="fake")(*tensors)
    for node in gm.graph.nodes:
        node.meta[STAGE] = 0
    nodes = list(gm.graph.find_nodes(op="placeholder"))
    capture = Joint(
        graph=gm,
        placeholders=tuple(Placeholder(node.name, "input") for node in nodes),
        outputs=(),
        aliases=True,
    )
    results = [node for node in capture.returned if isinstance(node, fx.Node)]
    capture.set_returned(results, [OutputRole("value", str(i)) for i in range(len(results))])
    PrepareBatch()(capture)
    return capture


def run_split(
    capture: Joint, tensors: Sequence[Tensor], seeds: Sequence[Placement | None], n: int
) -> tuple[Split, list[Tensor]]:
    """The results of running on `n` micro-batches, with the plan that led to them.

    Raises:
        CompileError: it is refused.
    """
    nodes = capture.placeholder_nodes
    placed = {node: seed for node, seed in zip(nodes, seeds, strict=True) if seed is not None}
    split = plan(capture, n, placed)
    values = {node.name: tensor for node, tensor in zip(nodes, tensors, strict=True)}
    pieces, names = cut(capture, split)
    for piece in pieces:
        values |= zip(piece.results, _run_piece(piece, values, n), strict=True)
    return split, [values[name] for name in names]


def _run_piece(piece: Piece, values: dict[str, Tensor], n: int) -> list[Tensor]:
    sources = [(name, values[source]) for name, source in piece.sources.items()]
    if not piece.joins:
        return list(piece.capture.graph(*(value for _, value in sources)))
    rounds = []
    for m in range(n):
        given = []
        for name, value in sources:
            shard = piece.slices.get(name)
            given.append(blocks(value, shard.dim, shard.outer, n)[m] if shard else value)
        rounds.append(piece.capture.graph(*given))
    results = []
    for join, parts in zip(piece.joins, zip(*rounds, strict=True), strict=True):
        if join.how == "sum":
            results.append(torch.stack(parts).sum(0).to(parts[0].dtype))
            continue
        dim, outer = join.rows.dim, join.rows.outer
        apart = [part.unflatten(dim, (outer, -1)) for part in parts]
        results.append(torch.cat(apart, dim + 1).flatten(dim, dim + 1).contiguous())
    return results


def is_split(split: Split, target: object) -> bool:
    """Whether an operator works on a part of the batch."""
    kinds = [split.at[node] for node in split.at if node.target is target]
    return any(kind not in (Kind.REPLICATE, Kind.DEFERRED) for kind in kinds)


def drawn_placements(tensors: Sequence[Tensor], n: int, rng: Random) -> list[Placement]:
    """For each tensor a dimension that divides, or the whole; often for one tensor only."""
    only = rng.randrange(len(tensors)) if rng.random() < 0.5 else None
    placements: list[Placement] = []
    for i, tensor in enumerate(tensors):
        dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] % n == 0]
        if tensor.numel() == 0:
            placements.append(Kind.PER_MICRO_BATCH)
        elif not dims or (rng.random() < 0.3 if only is None else i != only):
            placements.append(Kind.REPLICATE)
        else:
            dim = rng.choice(dims)
            placements.append(Shard(dim, tensor.shape[dim] // n if rng.random() < 0.2 else 1))
    return placements
