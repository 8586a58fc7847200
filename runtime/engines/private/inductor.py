"""Reach the private names of Inductor, to compile, save and load the code of a stage.

Apart from the other private names, because importing Inductor takes a second, which only the engine
that needs it should pay. Checked on PyTorch 2.13.0.
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from inspect import CO_VARARGS
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch._inductor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._inductor.standalone_compile import AOTCompiledArtifact

from ipu_dynamo.ops.private.native import custom_pass_names
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced
from ipu_dynamo.runtime.engines.private.inductor_compile_time import shortened_compiling

Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]
Layout = tuple[int, ...] | None
_MakeKernel = Callable[[list[str], str], object]
_INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # environment variable


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What Inductor has made of a graph.

    PyTorch puts functions around the code that it generates: they would make a result an alias of
    an input again, count a change in place, or copy a result over an input. The graphs here leave
    them nothing to do but to count, and looking costs as much as a small kernel.

    Args:
        run: takes a list of arguments and empties it, with grad mode off: then a tensor that
            nobody else holds ends with its last reader, and not with the call.
        unwrapped: it is the generated code itself, which counts no change in place.
        layouts: strides of the results; None: unknown.
    """

    run: Run
    unwrapped: bool = False
    layouts: tuple[Layout, ...] | None = None


def compile_artifact(
    graph: torch.fx.GraphModule,
    examples: list[torch.Tensor],
    settings: Mapping[str, object],
    results: int,
) -> tuple[MachineCode, tuple[bytes, dict[str, Path]] | None]:
    """Compile a flat graph for tensors laid out as `examples`; shapes and strides are fixed.

    The result checks shapes and strides when called, but no dtypes.

    Args:
        results: how many the graph has.

    Returns:
        The code, and what `load_artifact` makes it from in another process: None when PyTorch
        cannot save it.
    """
    bare = copy.deepcopy(graph)
    for node in bare.graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k == "stack_trace"}
    on_cpu = any(example.device.type == "cpu" for example in examples)
    with (
        _kernels_noted() as kernels,
        _graphs_noted() as graphs,
        shortened_compiling() if on_cpu else nullcontext(),
    ):
        artifact = _compile(bare, examples, settings)
    if not isinstance(artifact, AOTCompiledArtifact):
        return _unwrapped(_taking_a_list(artifact._compiled_fn), graphs, results), None
    code = _unwrapped(_within(artifact.inner_fn.compiled_fn), graphs, results)
    if torch.compiler.config.force_disable_caches:  # nothing was made to be saved
        return code, None
    libraries = {source: _library(kernel) for source, kernel in kernels.items()}
    return code, (artifact.serialize(), libraries)


def load_artifact(code: bytes, kernels: Mapping[str, Path], results: int) -> MachineCode:
    """The code of an artifact with so many results, with its kernels from shared libraries.

    `code` holds a pickle: it must come from a file that nobody else can write.
    """

    def load(original: _MakeKernel, argtypes: list[str], source: str) -> object:
        library = kernels.get(_digest(argtypes, source))
        if library is None:
            return original(argtypes, source)
        return CppPythonBindingsCodeCache._load_library(str(library), library.stem).kernel

    with _kernels_made_by(load), _graphs_noted() as graphs, torch.no_grad():
        artifact = AOTCompiledArtifact.deserialize(code)
    return _unwrapped(_within(artifact.inner_fn.compiled_fn), graphs, results)


@contextmanager
def inductor_folder(folder: Path | None) -> Iterator[None]:
    """Let Inductor write to `folder`, unless the user has named another one for it."""
    before = os.environ.get(_INDUCTOR_FOLDER)
    if folder is None or before not in (None, default_cache_dir()):
        yield
        return
    os.environ[_INDUCTOR_FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INDUCTOR_FOLDER]
        else:
            os.environ[_INDUCTOR_FOLDER] = before


def _compile(
    graph: torch.fx.GraphModule, examples: list[torch.Tensor], settings: Mapping[str, object]
) -> Any:
    """An artifact that can be saved, or if PyTorch cannot save this graph one that cannot."""
    compile_for = partial(
        torch._inductor.standalone_compile,
        dynamic_shapes="from_example_inputs",
        options={"config_patches": dict(settings)},
    )
    with torch.no_grad():
        try:
            if custom_pass_names() is not None:  # else nothing is cached, and nothing can be saved
                return compile_for(graph, list(examples), aot=True)
        except RuntimeError as error:
            if "serialize method" not in str(error):
                raise
        return compile_for(graph, list(examples))


@contextmanager
def _graphs_noted() -> Iterator[list[CompiledFxGraph]]:
    """The graphs that Inductor compiles, takes from its cache, or loads meanwhile."""
    noted: list[CompiledFxGraph] = []
    original = CompiledFxGraph.post_compile

    def post_compile(graph: CompiledFxGraph, *arguments: Any) -> None:
        original(graph, *arguments)
        noted.append(graph)

    with replaced(CompiledFxGraph, "post_compile", in_this_thread(post_compile, original)):
        yield noted


def _unwrapped(wrapped: Run, graphs: Sequence[CompiledFxGraph], results: int) -> MachineCode:
    """The code within `wrapped`, where that is one graph which returns what the caller gets: with
    a wrapper that writes inputs or orders effects, it would return more."""
    if len(graphs) != 1:
        return MachineCode(wrapped)
    (graph,) = graphs
    run, strides = graph.current_callable, graph.output_strides
    if run is None or strides is None or len(strides) != results:
        return MachineCode(wrapped)
    layouts = tuple(None if of is None else tuple(map(int, of)) for of in strides)
    return MachineCode(run, True, layouts)


def _taking_a_list(compiled: Callable[..., Sequence[torch.Tensor | None]]) -> Run:
    return lambda arguments: compiled(*arguments)


def _within(compiled: Any) -> Run:
    """What an artifact calls with a list of its arguments, and empties it."""
    while _takes_separately(compiled):
        compiled = compiled.__wrapped__
    within: Run = compiled
    return within


def _takes_separately(compiled: object) -> bool:
    return isinstance(compiled, FunctionType) and bool(compiled.__code__.co_flags & CO_VARARGS)


@contextmanager
def _kernels_noted() -> Iterator[dict[str, Any]]:
    """The kernels that Inductor makes meanwhile, by the digest of their source."""
    made: dict[str, Any] = {}

    def note(original: _MakeKernel, argtypes: list[str], source: str) -> object:
        kernel = made[_digest(argtypes, source)] = original(argtypes, source)
        return kernel

    with _kernels_made_by(note):
        yield made


@contextmanager
def _kernels_made_by(make: Callable[[_MakeKernel, list[str], str], object]) -> Iterator[None]:
    """Call `make` where generated code asks for a kernel of C++; it gets the original, too.

    Other threads get their kernels as before.
    """
    original = AsyncCompile.cpp_pybinding

    def cpp_pybinding(compiler: AsyncCompile, argtypes: list[str], source_code: str) -> object:
        return make(partial(original, compiler), argtypes, source_code)

    with replaced(AsyncCompile, "cpp_pybinding", in_this_thread(cpp_pybinding, original)):
        yield


def _digest(argtypes: Sequence[str], source: str) -> str:
    return sha256(repr((list(argtypes), source)).encode()).hexdigest()


def _library(kernel: Any) -> Path:
    """The file that a kernel, or a promise of one, was loaded from."""
    function: Any = kernel.result() if isinstance(kernel, LambdaFuture) else kernel
    return Path(function.__self__.__file__)
