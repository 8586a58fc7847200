"""Set how many threads work in one operator, for the calling thread alone.

`torch.set_num_threads` sets it for the calling thread, and for every thread whose first operator
runs later. A thread that a program starts in that time would keep the number for life. Torch reads
the number from OpenMP, and MKL has its own; both can be set for one thread.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_LIBRARY = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}


@contextmanager
def intra_op_threads(number: int | None) -> Iterator[None]:
    """Compute with so many intra-op threads in this thread; None is torch's number."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    try:
        set_intra_op_threads(number)
        yield
    finally:
        set_intra_op_threads(before)


def set_intra_op_threads(number: int) -> None:
    """Compute with so many intra-op threads in this thread from now on."""
    if torch.get_num_threads() != number:  # asking also lets torch set a new thread's number
        _setter()(number)


@cache
def _setter() -> Callable[[int], object]:
    """Find a function that sets the number for this thread alone.

    Else it is torch's own function, which new threads follow as long as the number holds.
    """
    library = Path(torch.__file__).parent / "lib" / _LIBRARY.get(sys.platform, "libtorch_cpu.so")
    try:
        torch_cpu = ctypes.CDLL(str(library))  # its symbols, and those of its libraries
        of_openmp = torch_cpu.omp_set_num_threads
        of_mkl = torch_cpu.MKL_Set_Num_Threads_Local if torch.backends.mkl.is_available() else None
    except (OSError, AttributeError):
        return torch.set_num_threads

    def set_own(number: int) -> None:
        of_openmp(number)
        if of_mkl is not None:
            of_mkl(number)

    return set_own if _is_heard(of_openmp) else torch.set_num_threads


def _is_heard(of_openmp: Callable[[int], object]) -> bool:
    """Whether this is the OpenMP that torch asks."""
    before = torch.get_num_threads()
    try:
        of_openmp(before + 1)
        return torch.get_num_threads() == before + 1
    finally:
        of_openmp(before)
