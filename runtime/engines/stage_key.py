"""Name everything that decides the machine code of a stage, for keys of compiled code."""

import operator
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import fx

from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.ops.private.native import (
    compiler_settings,
    custom_pass_names,
    find_compiler,
    mkldnn_enabled,
)
from ipu_dynamo.program import Function
from ipu_dynamo.program.recipe import FunctionRecipe
from ipu_dynamo.version import __version__

_COMPILES = [  # hand graphs to Inductor, and kernels to a compiler
    Path(__file__).parent.joinpath(f"{name}.py")
    for name in (
        "kernel_source",
        "private/inductor",
        "private/inductor_compile_time",
        "private/promised_kernels",
        "private/vector_instructions",
    )
]
_KNOWN = frozenset({"aten", "prims", "prim", "mkldnn", "mkl", "ipu"})  # of known versions


def stage_key(function: Function, settings: Mapping[str, object]) -> str | None:
    """A digest of graph, dtypes, shapes, strides, settings, threads, versions, compiler, processor.

    None if the code cannot be shared. Either the graph's text does not describe one of its tensors
    or operators, or the user has added a pass without a `uuid` to Inductor.
    """
    custom_passes = custom_pass_names()
    if custom_passes is None or not all(map(_is_described, function.operators)):
        return None
    parts = [
        function.code_key,
        sorted(settings.items()),
        torch.get_num_threads() if settings.get("cpp.threads") is None else None,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        mkldnn_enabled(),
        compiler_settings(),
        custom_passes,
        os.environ.get("ATEN_CPU_CAPABILITY"),
        this_machine(),
    ]
    return sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def keyed(recipe: FunctionRecipe) -> FunctionRecipe:
    """Return a recipe that knows the key of each function that it compiles."""
    if recipe.bodies:
        recipe = replace(recipe, bodies=tuple(map(keyed, recipe.bodies)))
    if recipe.parts is not None:
        parts = (replace(part, recipe=keyed(part.recipe)) for part in recipe.parts.parts)
        return replace(recipe, parts=replace(recipe.parts, parts=tuple(parts)))
    if recipe.engine != "inductor":
        return recipe
    return replace(recipe, key=stage_key(recipe.lowered, dict(recipe.settings)))


def _is_described(node: fx.Node) -> bool:
    """Whether the text of `node` describes its computation completely."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace in _KNOWN


@cache
def this_machine() -> tuple[object, ...]:
    """Return versions, compiler and processor, which do not change while a process runs."""
    return (
        sha256(b"".join(file.read_bytes() for file in _COMPILES)).hexdigest(),
        __version__,
        torch.__version__,
        torch.version.git_version,
        sys.version,
        _compiler(),
        platform.machine(),
        os.cpu_count(),
        sorted(torch.cpu.get_capabilities().items()),
        torch.version.cuda and torch.cuda.is_available() and torch.cuda.get_device_name(),
    )


def _compiler() -> tuple[str, int, int] | None:
    """The C++ compiler's file: another one has another size or date."""
    if (found := find_compiler()) is None:
        return None
    file = Path(found).resolve()
    return str(file), file.stat().st_size, file.stat().st_mtime_ns
