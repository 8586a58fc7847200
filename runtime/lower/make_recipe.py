"""Decide how a function becomes a callable on this machine."""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import fx

from ipu_dynamo.errors import source_line
from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.accumulate import accumulate_product, accumulate_rows
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.graph_queries import only_looks
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.program import RECOMPUTED, Function, make_function
from ipu_dynamo.program.recipe import Recipe
from ipu_dynamo.runtime.engines.engines import Engine, InductorEngine
from ipu_dynamo.runtime.engines.stage import Stage
from ipu_dynamo.runtime.engines.stage_key import stage_key
from ipu_dynamo.runtime.lower.choose_convolutions import choose_convolutions
from ipu_dynamo.runtime.lower.choose_matmuls import choose_products
from ipu_dynamo.runtime.lower.cut_loops import has_loop, parts_of
from ipu_dynamo.runtime.lower.figures import convolution_of
from ipu_dynamo.runtime.lower.inductor_faults import miscompiled

log = logging.getLogger(__name__)
Settings = tuple[tuple[str, bool | int], ...]
aten = torch.ops.aten
_MATMULS = {
    aten.addmm.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.mm.default,
    onednn.batched,
    onednn.matmul,
    onednn.packed,
    accumulate_product,
    accumulate_rows,
}
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def recipe_of(
    function: Function,
    engine: Engine,
    threads: int | None = None,
    constants: Collection[int] = (),
) -> Recipe:
    """How `engine` makes a callable of a function.

    Args:
        threads: intra-op threads of whoever calls it; None is torch's number.
        constants: positions of the inputs whose values stay the same from call to call, until
            the tensor itself is written, as its version counter tells.
    """
    releases = any(node.meta.get(RECOMPUTED) for node in function.operators)
    bodies = tuple(recipe_of(body, engine, threads) for body in _run_by(function))
    as_it_is = partial(Recipe, function, written=function.written, releases=releases, bodies=bodies)
    if engine.name != InductorEngine.name:
        return as_it_is(function, "eager", "the engine that was chosen", threads)
    if (fault := miscompiled(function.graph.graph)) is not None:
        log.warning(
            "@%s runs on the eager engine: Inductor of this PyTorch gets %%%s wrong (%s)",
            function.name,
            fault.name,
            source_line(fault),
        )
        return as_it_is(function, "eager", f"Inductor gets %{fault.name} wrong", threads)
    with compile_lock():
        if (figures := engine.figures) is None:
            chosen = choose_products(choose_convolutions(function), constants)
        else:
            choice = figures.choice()
            changed = choose_convolutions(function, partial(convolution_of, figures), choice=choice)
            chosen = choose_products(changed, constants, choice)
    lowered, packed = chosen.function, chosen.packed
    recipe = partial(as_it_is, lowered, threads=threads, packed=packed)
    if not any(map(_worth_compiling, lowered.operators)):
        return recipe(engine="eager", reason="Inductor would make no code of its own")
    settings = _settings(threads, packs=bool(packed))
    why = _changes(function, lowered)
    if has_loop(lowered.graph.graph):
        parts = parts_of(lowered, partial(_part, threads, settings, bodies))
        return recipe(engine="inductor", reason=f"{why}, cut at its loops", parts=parts)
    key = stage_key(lowered, dict(settings))
    return recipe(engine="inductor", reason=why, settings=settings, key=key)


def stage_of(function: Function, engine: Engine, threads: int | None = None) -> Stage:
    """The callable that `engine` makes of a function; see `recipe_of`."""
    return engine.compile(recipe_of(function, engine, threads))


def _part(
    threads: int | None,
    settings: Settings,
    bodies: Sequence[Recipe],
    name: str,
    graph: fx.GraphModule,
    loop: bool,
) -> Recipe:
    function = make_function(name, graph)
    of = partial(Recipe, function, function, threads=threads, written=function.written)
    if loop:
        names = {body.name for body in _run_by(function)}
        own = tuple(body for body in bodies if body.function.name in names)
        return of(engine="eager", reason="it loops by itself", bodies=own)
    key = stage_key(function, dict(settings))
    return of(engine="inductor", reason="between loops", settings=settings, key=key)


def _run_by(function: Function) -> tuple[Function, ...]:
    """The bodies of a function's own loops and branches, each once."""
    bodies = (body for node in function.operators for body in bodies_of(node))
    return tuple({body.name: make_function(body.name, body.graph) for body in bodies}.values())


def _changes(function: Function, lowered: Function) -> str:
    """What was chosen for this machine, in words."""
    before, after = (Counter(n.target for n in f.operators) for f in (function, lowered))
    counts = {
        "matmuls by oneDNN": after[onednn.matmul] + after[onednn.batched],
        "matmuls with packed weights": after[onednn.packed],
        "convolutions as matmuls": sum(before[t] - after[t] for t in _CONVOLUTIONS),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "as it is"


def _settings(threads: int | None, *, packs: bool) -> Settings:
    """What Inductor is told for a function.

    Half-precision results are rounded after every operator, also inside a fused kernel, so that
    they are what the eager engine computes.

    Args:
        packs: it takes packed weights, which have no strides that could be asserted.
    """
    settings: dict[str, bool | int] = {"emulate_precision_casts": True, "fallback_random": True}
    if threads is not None:
        settings["cpp.threads"] = threads
    if packs:
        settings["size_asserts"] = False
    return tuple(settings.items())


def _worth_compiling(node: fx.Node) -> bool:
    """Whether Inductor makes code of its own for an operator, and not a call of PyTorch's."""
    return not only_looks(node) and node.target not in _MATMULS
