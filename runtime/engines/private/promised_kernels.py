"""Let Inductor generate code whose kernels are compiled later, many of them together.

Checked on PyTorch 2.13.0; 2.14.1 has the same names.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from ipu_dynamo.ops.private.replacing import in_this_thread, replaced
from ipu_dynamo.runtime.engines.kernel_source import Kernel

Function = Callable[..., None]
SOURCE, LIBRARY = "unit.cpp", "unit.so"  # names of files in the compiler's working directory
# Inductor's errors if a compiler fails, or is missing.
COMPILER_ERRORS = (CppCompileError, InvalidCxxCompiler)
_Original = Callable[[list[str], str], Any]


class Promise:
    """A placeholder in generated code for a kernel that is compiled later.

    Args:
        command: of the compiler, from SOURCE to LIBRARY.
        alone: makes the kernel by itself.

    Attributes:
        problem: the error of a compiler that does not take it.
    """

    def __init__(self, kernel: Kernel, command: Sequence[str], alone: Callable[[], Any]) -> None:
        self.kernel, self.command, self._alone = kernel, tuple(command), alone
        self.function: Function | None = None
        self.problem = ""
        self._places: list[tuple[dict[str, Any], str]] = []

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel, compiled alone if needed.

        It may be called before the others are compiled, or after an interrupt of that.
        """
        (self.function or self.compiled_alone())(*arguments)

    def stands_in(self, scope: dict[str, Any], name: str) -> None:
        """Take notice of a global name in generated code."""
        self._places.append((scope, name))

    def keep(self, function: Function) -> None:
        """Put the kernel in its places."""
        self.function = function
        for scope, name in self._places:
            scope[name] = function
        self._places.clear()

    def compiled_alone(self) -> Function:
        """The kernel, compiled as Inductor does it.

        Raises:
            one of COMPILER_ERRORS
        """
        self.keep(function_of(self._alone()))
        assert self.function is not None
        return self.function


def function_of(kernel: Any) -> Function:
    """A kernel, once it is compiled."""
    if isinstance(kernel, Promise):
        return kernel.function or kernel.compiled_alone()
    function: Function = kernel.result() if isinstance(kernel, LambdaFuture) else kernel
    return function


def origin_of(function: Any) -> tuple[Path, str]:
    """The library that a kernel was loaded from, and its name there."""
    return Path(function.__self__.__file__), function.__name__


def load_function(library: Path, symbol: str) -> Function:
    """A kernel of a library."""
    module = CppPythonBindingsCodeCache._load_library(str(library), library.stem)
    function: Function = getattr(module, symbol)
    return function


@contextmanager
def kernels_promised() -> Iterator[dict[str, Any]]:
    """The kernels that this thread's generated code asks for meanwhile, by digest.

    Those that can share a file are promises, the others are compiled as Inductor does it.
    """
    kernels: dict[str, Any] = {}
    command = cache(compiler_command)  # the same for all that are made in this block

    def make(original: _Original, argtypes: list[str], source: str) -> Any:
        kernel = Kernel(tuple(argtypes), source)
        if kernel.digest not in kernels:
            alone = partial(_in(copy_context()), original, argtypes, source)
            line = command() if kernel.can_share else None
            kernels[kernel.digest] = Promise(kernel, line, alone) if line else alone()
        return kernels[kernel.digest]

    with kernels_made_by(make):
        yield kernels


@contextmanager
def kernels_made_by(make: Callable[[_Original, list[str], str], Any]) -> Iterator[None]:
    """Call `make` when generated code asks for a kernel of C++; `make` gets the original, too.

    Other threads get their kernels as before.
    """
    original, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def cpp_pybinding(compiler: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        return make(partial(original, compiler), argtypes, source_code)

    def wait_for_all(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
        wait(compiler, scope)
        for name, value in scope.items():
            if isinstance(value, Promise):
                value.stands_in(scope, name)

    with (
        replaced(AsyncCompile, "cpp_pybinding", in_this_thread(cpp_pybinding, original)),
        replaced(AsyncCompile, "wait", in_this_thread(wait_for_all, wait)),
    ):
        yield


def compiler_command() -> tuple[str, ...] | None:
    """Return Inductor's command to compile SOURCE to LIBRARY with the settings in force.

    None if Inductor would not use one command of the shell.
    """
    if sys.platform == "win32":
        return None
    try:
        options = CppTorchDeviceOptions(
            vec_isa=pick_vec_isa(),
            device_type="cpu",
            compile_only=False,
            **CppPythonBindingsCodeCache.cpp_compile_command_flags,
        )
        builder = CppBuilder(name=Path(LIBRARY).stem, sources=SOURCE, BuildOption=options)
        if builder.get_target_file_path() != LIBRARY:
            return None
        return tuple(shlex.split(builder.get_command_line()))
    except (AttributeError, TypeError):  # another release of PyTorch has another builder
        return None


def _in(context: Context) -> Callable[..., Any]:
    """Return a callable that calls a function with the settings that are in force now."""
    return lambda function, *arguments: context.copy().run(function, *arguments)
