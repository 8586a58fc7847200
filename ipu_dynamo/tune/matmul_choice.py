"""Choose the library that computes a class of matmuls."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.private.native import mkldnn_enabled
from ipu_dynamo.tune.costs import WORTH_CHANGING, WORTH_MEMORY
from ipu_dynamo.tune.matmul_classes import MEASURED, MatmulClass
from ipu_dynamo.tune.matmul_times import Way, matmul_times

MATMUL = "IPU_DYNAMO_MATMUL"  # environment variable: a library, or `auto`
_LIBRARIES = ("auto", "torch", "onednn")
_TORCH: Way = "torch"
Library = Literal["torch", "onednn"]


@dataclass(frozen=True)
class MatmulChoice:
    """Which library computes which matmuls.

    It depends on the machine and the environment only: the same matmul has the same one in every
    stage, wherever that is placed, with any number of threads.

    Args:
        forced: one library for all matmuls.
        times: returns the times of a class on this machine, and may measure them then. None: no
            times are known, and PyTorch's own library computes its matmuls.
    """

    forced: Library | None = None
    times: Callable[[MatmulClass], Mapping[Way, float] | None] = matmul_times

    def way(self, matmul: MatmulClass, *, packable: bool = False) -> Way:
        """How to compute matmuls of a class.

        Args:
            packable: the second operand is a weight that stays the same for many calls.
        """
        packable = packable and matmul.form == "a @ b.t()"
        if self.forced == "onednn":
            return "packed" if packable else "onednn"
        times, way = self.measured(matmul), _TORCH
        if not times:
            return way
        if times["onednn"] * WORTH_CHANGING <= times["torch"]:
            way = "onednn"
        worth = WORTH_CHANGING if way == "torch" else WORTH_MEMORY
        if packable and times.get("packed", inf) * worth <= times[way]:
            way = "packed"
        return way

    def measured(self, matmul: MatmulClass) -> Mapping[Way, float]:
        """Seconds of a matmul of the class by each library; empty if a library is forced."""
        return (self.times(matmul) if self.forced is None and matmul in MEASURED else None) or {}


def matmul_choice() -> MatmulChoice:
    """The choice in force here.

    Raises:
        IpuError: the environment names a library that does not exist, or is not here.
    """
    named = os.environ.get(MATMUL) or "auto"
    if named not in _LIBRARIES:
        raise IpuError(f"{MATMUL} is {named!r}: choose one of {', '.join(_LIBRARIES)}")
    if named == "onednn":
        return forced_choice("onednn")
    here = _has_onednn()
    exact = torch.get_float32_matmul_precision() == "highest"
    if named == "torch" or not here or not exact:
        return MatmulChoice(forced="torch")
    return MatmulChoice()


def forced_choice(library: Library) -> MatmulChoice:
    """One library for all matmuls.

    Raises:
        IpuError: it is not here.
    """
    if library == "onednn" and not _has_onednn():
        raise IpuError(
            "matmuls are to be oneDNN's, which this PyTorch lacks or has disabled\n"
            "  try:  torch.backends.mkldnn.set_flags(True), or the library torch"
        )
    return MatmulChoice(forced=library)


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and mkldnn_enabled()
