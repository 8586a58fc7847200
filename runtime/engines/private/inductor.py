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
from inspect import CO_VARARGS
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch._inductor
from torch._inductor.exc import InductorError as InductorError
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._inductor.standalone_compile import AOTCompiledArtifact

from ipu_dynamo.ops.private.native import custom_pass_names
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced
from ipu_dynamo.runtime.engines.kernel_source import Kernel
from ipu_dynamo.runtime.engines.private.inductor_compile_time import shortened_compiling
from ipu_dynamo.runtime.engines.private.promised_kernels import (
    function_of,
    kernels_made_by,
    kernels_promised,
    load_function,
    origin_of,
)

Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]
Layout = tuple[int, ...] | None
_INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # environment variable


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The code that Inductor generated for a graph.

    PyTorch puts functions around the code that it generates. They would make a result an alias of
    an input again, count a change in place, or copy a result over an input. For the graphs here
    they would only count, and their test for it costs as much as a small kernel.

    Args:
        run: takes a list of arguments and empties it, with grad mode off. Then a tensor that only
            the list holds ends with its last reader, and not with the call.
        unwrapped: it is the generated code itself, which counts no change in place.
        layouts: strides of the results; None: unknown.
    """

    run: Run
    unwrapped: bool = False
    layouts: tuple[Layout, ...] | None = None


@dataclass(frozen=True, slots=True)
class Lowered:
    """The code that Inductor generated for a graph, before its kernels are compiled.

    Args:
        code: runs once the kernels are compiled.
        kernels: by the digest of their source; promises among them.
        saved: input for `load_artifact` in another process; None: PyTorch cannot save it.
    """

    code: MachineCode
    kernels: Mapping[str, Any]
    saved: bytes | None

    def libraries(self) -> dict[str, tuple[Path, str]]:
        """The library of each compiled kernel, and its name there."""
        return {digest: origin_of(function_of(made)) for digest, made in self.kernels.items()}


def lower_artifact(
    graph: torch.fx.GraphModule,
    examples: list[torch.Tensor],
    settings: Mapping[str, object],
    results: int,
) -> Lowered:
    """Generate code of a flat graph for tensors as `examples` are; shapes and strides are fixed.

    The result checks shapes and strides when called, but no dtypes.

    Args:
        results: how many the graph has.
    """
    bare = copy.deepcopy(graph)
    for node in bare.graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k == "stack_trace"}
    on_cpu = any(example.device.type == "cpu" for example in examples)
    with (
        kernels_promised() as kernels,
        _graphs_noted() as graphs,
        shortened_compiling() if on_cpu else nullcontext(),
    ):
        artifact = _compile(bare, examples, settings)
    if not isinstance(artifact, AOTCompiledArtifact):
        code = _unwrapped(_taking_a_list(artifact._compiled_fn), graphs, results)
        return Lowered(code, kernels, None)
    code = _unwrapped(_within(artifact.inner_fn.compiled_fn), graphs, results)
    if torch.compiler.config.force_disable_caches:  # nothing was made to be saved
        return Lowered(code, kernels, None)
    return Lowered(code, kernels, artifact.serialize())


def load_artifact(
    code: bytes, kernels: Mapping[str, tuple[Path, str]], results: int
) -> MachineCode:
    """The code of an artifact with so many results, with its kernels from shared libraries.

    `code` holds a pickle: it must come from a file that only the user can write.
    """

    def load(original: Callable[..., Any], argtypes: list[str], source: str) -> Any:
        origin = kernels.get(Kernel(tuple(argtypes), source).digest)
        return original(argtypes, source) if origin is None else load_function(*origin)

    with kernels_made_by(load), _graphs_noted() as graphs, torch.no_grad():
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
            if isinstance(inner := getattr(error, "inner_exception", None), OSError):
                raise inner from error  # Inductor cannot write its files
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
    """Return the code within `wrapped` if it is one graph with just the caller's results.

    With a wrapper that writes inputs or orders effects, the graph would return more.
    """
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
    """Return the function that an artifact calls with a list of arguments, which it empties."""
    while _takes_separately(compiled):
        compiled = compiled.__wrapped__
    within: Run = compiled
    return within


def _takes_separately(compiled: object) -> bool:
    return isinstance(compiled, FunctionType) and bool(compiled.__code__.co_flags & CO_VARARGS)
