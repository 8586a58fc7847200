"""Shorten what Inductor does while it compiles; the code that it makes stays the same.

Checked on PyTorch 2.13.0.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from typing import Any

from torch._inductor import config, cpu_vec_isa, sizevars
from torch._inductor.cpu_vec_isa import VecISA


@contextmanager
def shortened_compiling() -> Iterator[None]:
    """Shorten what is compiled meanwhile."""
    with vector_sets_tried(), polynomial_indices_kept():
        yield


@contextmanager
def vector_sets_tried() -> Iterator[None]:
    """Let a thread find out which vector instructions the C++ compiler knows, meanwhile.

    Inductor asks once in a process, when it has scheduled the loops; trying takes seconds where
    nothing is cached.
    """
    original = cpu_vec_isa.valid_vec_isa_list
    in_context = copy_context().run  # Inductor's settings are a thread's own
    with ThreadPoolExecutor(1, "vector-instructions") as pool:
        found = pool.submit(in_context, _vector_sets, original)
        cpu_vec_isa.valid_vec_isa_list = found.result  # type: ignore[assignment]
        try:
            yield
        finally:
            cpu_vec_isa.valid_vec_isa_list = original


def _vector_sets(find_all: Callable[[], list[VecISA]]) -> list[VecISA]:
    """The sets that can be used, widest first; only the widest where no setting names another."""
    if os.environ.get("ATEN_CPU_CAPABILITY") or config.cpp.simdlen is not None:
        return find_all()
    widest = _widest_x86_set()
    return find_all() if widest is None else [widest]


@cache
def _widest_x86_set() -> VecISA | None:
    """What `valid_vec_isa_list` would begin with; it tries every set, for seconds each."""
    has = {*cpu_vec_isa.x86_isa_checker()}  # empty on other processors
    sets = cpu_vec_isa.supported_vec_isa_list
    return next((one for one in sets if {*str(one).split()} <= has and one), None)


@contextmanager
def polynomial_indices_kept() -> Iterator[None]:
    """Let Inductor take strides of polynomials without simplifying these before.

    Simplifying takes 10 ms for each variable of `64*x1 + 8*x2 + x3 + 11741`, and hundreds of such
    indices are in a convolution's patches. Only quotients and remainders have a simpler form.
    """
    original = sizevars.simplify_index_in_vec_range

    def simplified(index: Any, variable: Any, vector: int) -> Any:  # SymPy has no types
        if index.is_polynomial(*index.free_symbols):
            return index
        return original(index, variable, vector)

    sizevars.simplify_index_in_vec_range = simplified  # type: ignore[assignment]
    try:
        yield
    finally:
        sizevars.simplify_index_in_vec_range = original
