"""Shorten what Inductor does while it compiles; the code that it makes stays the same.

Names of PyTorch are replaced meanwhile; they answer other threads that compile as they did before.
Checked on PyTorch 2.13.0.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from typing import Any

from torch._inductor import config, cpu_vec_isa, sizevars
from torch._inductor.cpu_vec_isa import VecISA


@contextmanager
def shortened_compiling() -> Iterator[None]:
    """Shorten what is compiled for a CPU meanwhile."""
    with vector_sets_tried(), polynomial_indices_kept():
        yield


@contextmanager
def vector_sets_tried() -> Iterator[None]:
    """Let a thread try the widest set of vector instructions in the C++ compiler, meanwhile.

    Inductor tries all that the processor has when it has scheduled the first loops, for seconds
    each where nothing is cached, and then takes the first one if no setting names another.
    """
    original = cpu_vec_isa.valid_vec_isa_list
    with ThreadPoolExecutor(1, "vector-instructions") as pool:
        found = pool.submit(copy_context().run, _widest_x86_set)  # settings are a thread's own

        def sets() -> list[VecISA]:
            widest = found.result()  # before others are tried: PyTorch's trials change the sets
            named = os.environ.get("ATEN_CPU_CAPABILITY") or config.cpp.simdlen is not None
            return original() if widest is None or named else [widest]

        cpu_vec_isa.valid_vec_isa_list = sets  # type: ignore[assignment]
        try:
            yield
        finally:
            cpu_vec_isa.valid_vec_isa_list = original


@cache
def _widest_x86_set() -> VecISA | None:
    """The first that `valid_vec_isa_list` would find, on x86."""
    if sys.platform not in ("linux", "win32"):
        return None
    has = {*cpu_vec_isa.x86_isa_checker()}  # empty on other processors
    sets = cpu_vec_isa.supported_vec_isa_list
    return next((one for one in sets if {*str(one).split()} <= has and one), None)


@contextmanager
def polynomial_indices_kept() -> Iterator[None]:
    """Let Inductor take strides of polynomials without simplifying these before.

    Simplifying takes 10 ms for each variable of `64*x1 + 8*x2 + x3 + 11741`, and hundreds of such
    indices are in a convolution's patches. It changes strides only where there are quotients or
    remainders, which can be constant within a vector.
    """
    original = sizevars.simplify_index_in_vec_range

    def simplified(index: Any, variable: Any, vector: int) -> Any:  # SymPy has no types
        is_polynomial = getattr(index, "is_polynomial", None)  # relations do not have it
        if is_polynomial is not None and is_polynomial(*index.free_symbols):
            return index
        return original(index, variable, vector)

    sizevars.simplify_index_in_vec_range = simplified  # type: ignore[assignment]
    try:
        yield
    finally:
        sizevars.simplify_index_in_vec_range = original
