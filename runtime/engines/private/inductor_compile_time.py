"""Shorten what Inductor does while it compiles; the code that it makes stays the same.

Names of PyTorch are replaced meanwhile; they answer other threads that compile as they did before.
Checked on PyTorch 2.13.0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor import sizevars

from ipu_dynamo.ops.private.replacing import in_this_thread, replaced
from ipu_dynamo.runtime.engines.private.vector_instructions import vector_sets_known


@contextmanager
def shortened_compiling() -> Iterator[None]:
    """Shorten what is compiled for a CPU meanwhile."""
    with vector_sets_known(), polynomial_indices_kept():
        yield


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

    here = in_this_thread(simplified, original)
    with replaced(sizevars, "simplify_index_in_vec_range", here):
        yield
