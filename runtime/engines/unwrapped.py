"""Call Inductor's code without the wrappers around it, once a call has shown that they do nothing.

PyTorch puts functions around the code of a graph: they would make a result an alias of an input
again, count a change in place, or copy a result over an input. For most stages there is nothing to
do, and looking costs as much as a small kernel.
"""

import sys
from collections.abc import Callable, Sequence
from operator import is_
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.ops.private.native import code_within, wrapped_code

Run = Callable[[list[Tensor]], Sequence[Tensor | None]]


def direct(run: Run, graph: fx.Graph) -> Run:
    """`run`, or from the second call on only the code inside it.

    The first call outside a profiler is watched: what is inside it must get the arguments as they
    are, and its results must be what the caller gets. Grad mode has to be off, as the code expects.
    """
    if any(writes(node) for node in graph.nodes):
        return run
    watched = False
    inside: Run | None = None

    def stage(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        nonlocal watched, inside
        if inside is not None and not torch.is_grad_enabled():
            return inside(arguments)
        if watched or sys.getprofile() is not None:  # a profiler in C could not be put back
            return run(arguments)
        results, found = _watch(run, arguments)
        watched, inside = True, found
        return results

    return stage


def _watch(run: Run, arguments: list[Tensor]) -> tuple[Sequence[Tensor | None], Run | None]:
    """Call `run`; find the one function in it that takes and returns the same objects."""
    given, wrapped = list(arguments), wrapped_code()
    calls: list[tuple[Run, list[Any]]] = []
    returned: list[Any] = []

    def note(frame: FrameType, event: str, value: Any) -> None:
        if frame.f_code is not wrapped:
            return
        if event == "call":
            calls.append(code_within(frame.f_locals))
        elif event == "return":
            returned.append(value)

    sys.setprofile(note)
    try:
        results = run(arguments)
    finally:
        sys.setprofile(None)
    if len(calls) == len(returned) == 1 and returned[0] is not None:
        ((inside, taken),) = calls
        if _same(taken, given) and _same(returned[0], results):
            return results, inside
    return results, None


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))
