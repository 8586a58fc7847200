"""Make repros of the differences that a search found, and check that they show them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.debug.mismatch import Mismatch, Values
from ipu_dynamo.debug.repro import Repro, drawn
from ipu_dynamo.debug.snapshots import Snapshot, arguments
from ipu_dynamo.debug.sources import cut, python
from ipu_dynamo.debug.stepping import WrongCall, result_node
from ipu_dynamo.debug.values import differ, kept
from ipu_dynamo.debug.values import tensors as flat
from ipu_dynamo.whole_step.api import compile_inference

_ENGINE = """def found(*given):
    options = {{"engine": "{engine}", "check_compiled": "off"}}
    return ipu_dynamo.compile_inference(expected, options)(*given)
"""
_GRADIENT = """def expected(*given):
    given[{place}].requires_grad_()
    return torch.autograd.grad(loss(*given).sum() * {start}, given[{place}])[0]
"""
_RECORDED = "def expected(recorded):\n    return recorded\n"


def repro_of_pass(wrong: Mismatch, old: Values, new: Values, rtol: float | None) -> Repro | None:
    """The operators that differ, as they were before a pass and after it."""
    for whole in (False, True):
        stops = set(wrong.same.values())
        before, mine = cut(wrong.expected, stops, lambda n: n.name, whole=whole)
        mirrored = {n for n, old_one in wrong.same.items() if old_one is not wrong.expected}
        after, theirs = cut(wrong.found, mirrored, partial(_name, wrong), whole=whole)
        tensors = {_name(wrong, node): new[node] for node in theirs}
        tensors |= {node.name: old[node] for node in mine}
        names = [n.name for n in mine], [_name(wrong, n) for n in theirs]
        shows = partial(_shows, before, after, *names, rtol)
        if shows(tensors):
            return _repro(before, after, *names, tensors, seeded=shows(drawn(tensors)))
    return None


def repro_of_gradient(
    before: Snapshot,
    after: Snapshot,
    node: fx.Node,
    parameter: str,
    given: Mapping[str, Tensor],
    start: float,
) -> Repro:
    """The whole forward pass with autograd, and the graph that should give the same gradient."""
    assert before.loss is not None
    roles = {n: role.name for n, role in (*before.roles.items(), *after.roles.items())}
    names = {name: f"t{i}" for i, name in enumerate(dict.fromkeys(roles.values()))}

    def named(n: fx.Node) -> str:
        return names[roles[n]]

    forward, mine = cut(before.loss, (), named, whole=True)
    backward, theirs = cut(node, (), named, whole=True)
    tensors = {
        names[role.name]: tensor
        for snapshot in (after, before)
        for role, tensor in zip(snapshot.roles.values(), arguments(snapshot, given), strict=True)
    }
    loss, imports = python(forward, "loss")
    found, more = python(backward, "found")
    place = [named(n) for n in mine].index(names[parameter])
    return Repro(
        title="", text="",
        expected=loss + "\n\n" + _GRADIENT.format(place=place, start=start),
        found=found,
        expected_names=[named(n) for n in mine],
        found_names=[named(n) for n in theirs],
        imports=[*imports, *more],
        tensors={n: tensors[n] for n in {*map(named, mine), *map(named, theirs)}},
        seeded=False,
    )  # fmt: skip


def repro_of_engine(
    wrong: WrongCall, node: fx.Node | None, engine: str, rtol: float | None
) -> Repro:
    """A part of the function on eager PyTorch and on the engine; all of it if no part shows it."""
    graph = wrong.function.graph.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    given = dict(zip(placeholders, wrong.given, strict=True))
    everything = tuple(n for n in wrong.function.operators if isinstance(n.meta.get("val"), Tensor))
    targets: list[Any] = [n for n in (node,) if n is not None] + [everything]
    for target in targets:
        part, inputs = cut(target, (), lambda n: n.name)
        run = fx.GraphModule(torch.nn.Module(), part)
        tensors = {n.name: given[n] for n in inputs}
        options = {"engine": engine, "check_compiled": "off"}
        compiled = compile_inference(lambda *given, run=run: run(*given), options)
        with torch.no_grad():
            ours = compiled(*map(kept, tensors.values()))
            theirs = run(*map(kept, tensors.values()))
        if differ(ours, theirs, rtol):
            break
    source, imports = python(part, "expected")
    return Repro(
        title="", text="", expected=source, found=_ENGINE.format(engine=engine),
        expected_names=list(tensors), found_names=list(tensors),
        imports=[*imports, "", "import ipu_dynamo"], tensors=tensors, seeded=False,
    )  # fmt: skip


def repro_of_call(wrong: WrongCall) -> Repro | None:
    """The function as it was cut out, and the value in the whole graph."""
    node = result_node(wrong.function, wrong.call, wrong.name)
    if node is None:
        return None
    part, inputs = cut(node, (), lambda n: n.name)
    placeholders = wrong.function.graph.graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, wrong.given, strict=True))
    source, imports = python(part, "found")
    return Repro(
        title="", text="", expected=_RECORDED, found=source,
        expected_names=["recorded"], found_names=[n.name for n in inputs], imports=imports,
        tensors={n.name: given[n] for n in inputs} | {"recorded": wrong.expected}, seeded=False,
    )  # fmt: skip


def _name(wrong: Mismatch, node: fx.Node) -> str:
    """The name of an input of the later graph: that of its counterpart, if it has one."""
    known = wrong.same.get(node)
    return known.name if known is not None else f"{node.name}_after"


def _shows(
    before: fx.Graph,
    after: fx.Graph,
    mine: list[str],
    theirs: list[str],
    rtol: float | None,
    tensors: Mapping[str, Tensor],
) -> bool:
    """Whether two graphs differ on these inputs, in finite numbers."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        expected, found = (
            fx.GraphModule(torch.nn.Module(), graph)(*[kept(tensors[name]) for name in names])
            for graph, names in ((before, mine), (after, theirs))
        )
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in flat(expected))
    return differ(found, expected, rtol) and finite


def _repro(
    before: fx.Graph,
    after: fx.Graph,
    mine: list[str],
    theirs: list[str],
    tensors: Mapping[str, Tensor],
    *,
    seeded: bool,
) -> Repro:
    expected, imports = python(before, "expected")
    found, more = python(after, "found")
    return Repro(
        title="", text="", expected=expected, found=found, expected_names=mine,
        found_names=theirs, imports=[*imports, *more], tensors=dict(tensors), seeded=seeded,
    )  # fmt: skip
