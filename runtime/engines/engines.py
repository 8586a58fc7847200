"""Turn a program's functions into callables: compiled by Inductor, or run operator by operator."""

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, fx

from ipu_dynamo.errors import IpuError, source_line
from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.accumulate import accumulate_product, accumulate_rows
from ipu_dynamo.ops.graph_queries import only_looks
from ipu_dynamo.ops.private.locks import compile_lock
from ipu_dynamo.ops.private.native import cpp_compiler_names
from ipu_dynamo.program import Function, graph_outputs, make_function
from ipu_dynamo.runtime.engines.eager_code import eager_code
from ipu_dynamo.runtime.engines.inductor_noise import mute
from ipu_dynamo.runtime.engines.unwrapped import direct
from ipu_dynamo.runtime.lower.choose_convolutions import choose_convolutions
from ipu_dynamo.runtime.lower.choose_matmuls import choose_products
from ipu_dynamo.runtime.lower.cut_loops import has_loop, run_in_segments
from ipu_dynamo.runtime.lower.figures import Figures
from ipu_dynamo.runtime.lower.inductor_faults import miscompiled
from ipu_dynamo.runtime.lower.prepack_weights import packing

log = logging.getLogger(__name__)
Stage = Callable[[list[Tensor]], Sequence[Tensor | None]]
ENGINE = "IPU_DYNAMO_ENGINE"  # environment variable: what `auto` stands for
aten = torch.ops.aten
_PRODUCTS = {
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
_ENGINES = ("auto", "inductor", "eager")


class Engine(Protocol):
    """Makes callables from functions; counts how many it made.

    Attributes:
        links: whether one function for a step and its update is faster than two.
    """

    name: str
    links: bool
    compiled: int

    def compile(
        self, function: Function, threads: int | None = None, constants: Collection[int] = ()
    ) -> Stage:
        """A callable on a list of tensors, which it may change.

        Args:
            threads: intra-op threads of whoever calls it; None is torch's number.
            constants: positions of the inputs whose values stay the same from call to call, until
                the tensor itself is written, as its version counter tells.
        """


class EagerEngine:
    """Runs a function's operators one by one: the reference for every other engine."""

    name = "eager"
    links = False

    def __init__(self) -> None:
        self.compiled = 0

    def compile(
        self, function: Function, threads: int | None = None, constants: Collection[int] = ()
    ) -> Stage:
        self.compiled += 1
        return eager_code(function.graph.graph)


class InductorEngine:
    """Compiles a function to machine code with PyTorch's Inductor.

    Half-precision results are rounded after every operator, also inside a fused kernel, so that
    they are what the eager engine computes.

    Args:
        figures: decide by these which library computes a product; None: by those of this machine.
    """

    name = "inductor"
    links = True

    def __init__(self, figures: Figures | None = None) -> None:
        mute()
        self.compiled = 0
        self._figures = figures
        self._settings: dict[str, bool | int] = {
            "emulate_precision_casts": True,
            "fallback_random": True,
        }

    def compile(
        self, function: Function, threads: int | None = None, constants: Collection[int] = ()
    ) -> Stage:
        with compile_lock():
            return self._compile_alone(function, threads, constants)

    def _compile_alone(
        self, function: Function, threads: int | None, constants: Collection[int]
    ) -> Stage:
        self.compiled += 1
        fault = miscompiled(function.graph.graph)
        if fault is not None:
            log.warning(
                "@%s runs on the eager engine: Inductor of this PyTorch gets %%%s wrong (%s)",
                function.name,
                fault.name,
                source_line(fault),
            )
            return EagerEngine().compile(function)
        if (figures := self._figures) is None:
            chosen = choose_products(choose_convolutions(function), constants)
        else:
            choice = figures.choice()
            function = choose_convolutions(function, figures.convolution, choice=choice)
            chosen = choose_products(function, constants, choice)
        run = self._compile(chosen.function, threads, packs=bool(chosen.packed))
        return packing(run, chosen.packed) if chosen.packed else run

    def _compile(self, function: Function, threads: int | None, *, packs: bool) -> Stage:
        if not any(_worth_compiling(node) for node in function.operators):
            return eager_code(function.graph.graph)
        settings = self._settings | ({} if threads is None else {"cpp.threads": threads})
        if packs:  # packed weights have no strides that could be asserted
            settings["size_asserts"] = False
        if has_loop(function.graph.graph):
            return run_in_segments(
                function.graph,
                lambda graph: _compile(make_function(f"{function.name}_part", graph), settings),
            )
        return _compile(function, settings)


def _compile(function: Function, settings: Mapping[str, object]) -> Stage:
    """Machine code for a function."""
    from ipu_dynamo.runtime.engines.compiled_stages import (
        machine_code,  # Inductor: a second to import
    )

    examples = [
        torch.zeros(()).new_empty(0) if value is None else _example(value)
        for value in (n.meta["val"] for n in function.graph.graph.find_nodes(op="placeholder"))
    ]
    run = direct(machine_code(function, examples, settings), function.graph.graph)
    return _laid_out(run, [_stride(value) for value in graph_outputs(function.graph)])


def _worth_compiling(node: fx.Node) -> bool:
    """Whether Inductor makes code of its own for an operator, and not a call of PyTorch's."""
    return not only_looks(node) and node.target not in _PRODUCTS


def make_engine(name: str, figures: Figures | None = None) -> Engine:
    """The engine called `name`.

    `auto`: the one that the environment variable IPU_DYNAMO_ENGINE names (`auto`, `inductor` or
    `eager`), else Inductor where a C++ compiler is found, else eager.
    """
    if name == "auto":
        name = os.environ.get(ENGINE) or "auto"
        if name not in _ENGINES:
            raise IpuError(f"{ENGINE} is {name!r}: choose one of {', '.join(_ENGINES)}")
    if name == "eager":
        return EagerEngine()
    if _compiler() is not None:
        return InductorEngine(figures)
    if name == "inductor":
        raise IpuError(
            "the inductor engine needs a C++ compiler: install g++ or clang++, or "
            "choose engine='eager'"
        )
    return EagerEngine()


@cache
def _compiler() -> str | None:
    """The C++ compiler that Inductor will find; one line of log when there is none."""
    found = next((path for name in cpp_compiler_names() if (path := shutil.which(name))), None)
    if found is None:
        log.warning("no C++ compiler found: stages run on the eager engine, operator by operator")
    return found


def _laid_out(run: Stage, strides: Sequence[tuple[int, ...] | None]) -> Stage:
    """`run`, with results in the memory layout that the functions which read them expect.

    Inductor mostly keeps the layout of eager PyTorch, but not always (`cat` of transposed parts).
    The first call finds the results that differ; they are copied from then on.
    """
    wrong: list[int] | None = None

    def stage(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        nonlocal wrong
        results = run(arguments)
        if wrong is None:
            pairs = zip(results, strides, strict=True)
            wrong = [i for i, (t, s) in enumerate(pairs) if t is not None and t.stride() != s]
        if not wrong:
            return results
        fixed = list(results)
        for i in wrong:
            found, stride = fixed[i], strides[i]
            assert found is not None
            assert stride is not None
            fixed[i] = _copy_laid_out(found, stride)
        return fixed

    return stage


def _copy_laid_out(found: Tensor, stride: Sequence[int]) -> Tensor:
    """A copy in another layout; along a stride of 0 all elements are the same."""
    once = found
    for dim, step in enumerate(stride):
        if step == 0 and found.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    dense = once.new_empty_strided(once.shape, stride).copy_(once)
    return dense.as_strided(found.shape, stride)


def _stride(result: object) -> tuple[int, ...] | None:
    """The memory layout of a function's output node; None for an output without a tensor."""
    return tuple(result.meta["val"].stride()) if isinstance(result, fx.Node) else None


def _example(value: Tensor) -> Tensor:
    """A real tensor with the layout of a fake one."""
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    ).zero_()
