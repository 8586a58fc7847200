"""Shorten Inductor's work while it compiles; the generated code stays the same.

Names of PyTorch are replaced meanwhile; they answer other threads that compile as they did before.
Checked on PyTorch 2.13.0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch._inductor import config, dtype_propagation, sizevars, utils
from torch._inductor.codegen import common

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced
from ipu_dynamo.runtime.engines.private.vector_instructions import vector_sets_known


@contextmanager
def shortened_compiling() -> Iterator[None]:
    """Shorten compilations for a CPU in this block."""
    with (
        templates_on_demand(),  # first: the next ones import some
        attention_patterns_on_demand(),
        vector_sets_known(),
        indices_shortened(),
        dtype_rules_made_once(),
    ):
        yield


@contextmanager
def indices_shortened() -> Iterator[None]:
    """Let Inductor simplify only the terms of an index that a stride depends on.

    Simplifying takes 10 ms for each variable of `64*x1 + 8*x2 + x3 + 11741`, and hundreds of such
    indices are in a convolution's patches. It changes strides only where there are quotients or
    remainders, which can be constant within a vector. Of `512*x0 + 4*(x2//2) + x3//2` along `x3`,
    `x3//2` is left. The same terms are in other indices, and PyTorch caches what it simplifies.
    """
    original = sizevars.simplify_index_in_vec_range

    def simplified(index: Any, variable: Any, vector: int) -> Any:  # SymPy has no types
        if getattr(index, "is_Add", False):
            _, index = index.as_independent(variable, as_Add=True)
        is_polynomial = getattr(index, "is_polynomial", None)  # relations do not have it
        if is_polynomial is not None and is_polynomial(*index.free_symbols):
            return index
        return original(index, variable, vector)

    here = in_this_thread(simplified, original)
    with replaced(sizevars, "simplify_index_in_vec_range", here):
        yield


@contextmanager
def dtype_rules_made_once() -> Iterator[None]:
    """Let Inductor make its rules for the dtypes of results once in a compilation.

    They are in one object, which makes all 200 of them again for each operator of each generated
    kernel. This is a seventh of the time until the compiler gets small functions.
    """
    handler = dtype_propagation.DtypePropagationOpsHandler
    original: Any = handler.__init__
    made_of = 0  # so many registered rules

    def make(self: Any) -> None:
        nonlocal made_of
        registered = len(utils.op_dtype_propagation_rules)
        if registered != made_of:
            original(self)
            made_of = registered

    with replaced(handler, "__init__", in_this_thread(make, original)):
        yield


class _Template:
    """A template of Jinja, which is compiled when it is first asked for something.

    Args:
        compile_: gives the template.
    """

    def __init__(self, compile_: Callable[[], Any]) -> None:
        self._compiled = cache(compile_)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `copy` looks for methods of the object
            raise AttributeError(name)
        return getattr(self._compiled(), name)


@contextmanager
def templates_on_demand() -> Iterator[None]:
    """Let Inductor compile templates only when they are rendered.

    It makes two dozen of kernels for GPUs when it is imported, which takes half a second.
    """
    owner, name = common.KernelTemplate, "_template_from_string"
    original = getattr(owner, name)

    def template(source: str) -> Any:
        return None if common.jinja2_env() is None else _Template(partial(original, source))

    with replaced(owner, name, staticmethod(in_this_thread(template, original))):
        yield


@contextmanager
def attention_patterns_on_demand() -> Iterator[None]:
    """Let Inductor register patterns of attention for a graph that may have attention in it.

    Each of them has a batched product in it, and to register them takes as long as to compile a
    small graph. The next compilation in this process finds that they are missing.
    """
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import fuse_attention, joint_graph

    run, register = vars(compile_fx)["joint_graph_passes"], fuse_attention._sfdp_init
    all_registered: Any = joint_graph.lazy_init  # with a cache that says so

    def joint_graph_passes(graph: torch.fx.GraphModule, *arguments: Any, **named: Any) -> Any:
        if config.joint_custom_pre_pass or graph.graph.find_nodes(
            op="call_function", target=aten.bmm.default
        ):
            return run(graph, *arguments, **named)
        left_out = []
        later = in_this_thread(lambda *devices, **_: left_out.append(devices), register)
        with replaced(fuse_attention, "_sfdp_init", later):
            try:
                return run(graph, *arguments, **named)
            finally:
                if left_out:
                    all_registered.cache_clear()

    with replaced(compile_fx, "joint_graph_passes", in_this_thread(joint_graph_passes, run)):
        yield
