"""Compile the kernels of a program together, and find those that do not compile."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ipu_dynamo.runtime.engines.compiler_process import CompilerFailed, run_compiler
from ipu_dynamo.runtime.engines.kernel_source import unit_source
from ipu_dynamo.runtime.engines.precompiled_header import with_header
from ipu_dynamo.runtime.engines.private.promised_kernels import (
    COMPILER_ERRORS,
    LIBRARY,
    SOURCE,
    Promise,
    load_function,
)
from ipu_dynamo.tune.costs import KERNELS_IN_A_UNIT

log = logging.getLogger(__name__)
_NOTHING_COMPILES = "No space left on device", "Read-only file system"
Scratch = Callable[[], AbstractContextManager[Path]]
Keep = Callable[[Path], Path]


class _NothingWrittenError(Exception):
    """The compiler's command succeeded, but wrote no library."""


def compile_kernels(promises: Iterable[Promise], scratch: Scratch, keep: Keep) -> list[Promise]:
    """Compile kernels, as many as may be in one file, and put them in their places.

    Args:
        scratch: makes a folder for the compiler.
        keep: moves a library from there to a place where it can be loaded later.

    Returns:
        Those that no compiler takes: neither with others, nor as Inductor does it.
    """
    groups: dict[tuple[str, ...], dict[str, list[Promise]]] = {}
    for promise in promises:
        if promise.function is None:
            equal = groups.setdefault(promise.command, {})
            equal.setdefault(promise.kernel.digest, []).append(promise)
    failed: list[Promise] = []
    for group in groups.values():
        for unit in _batched([same[0] for same in group.values()], KERNELS_IN_A_UNIT):
            failed += _compile(unit, scratch, keep)
        for first, *others in group.values():
            for other in others:
                if first.function is not None:
                    other.keep(first.function)
                else:
                    other.problem = first.problem
                    failed.append(other)
    return failed


def _batched(promises: Sequence[Promise], count: int) -> Iterator[Sequence[Promise]]:
    for first in range(0, len(promises), count):
        yield promises[first : first + count]


def _compile(group: Sequence[Promise], scratch: Scratch, keep: Keep) -> list[Promise]:
    """Halve a group that does not compile, until a kernel is alone with its error."""
    try:
        _compile_together(group, scratch, keep)
        return []
    except _NothingWrittenError as error:  # nor would it write anything for Inductor
        log.debug("%s", error)
        for promise in group:
            promise.problem = str(error)
        return list(group)
    except (CompilerFailed, OSError, ImportError) as error:
        problem = error
    of_a_kernel = isinstance(problem, CompilerFailed) and not any(
        text in str(problem) for text in _NOTHING_COMPILES
    )
    if len(group) > 1 and of_a_kernel:
        half = len(group) // 2
        return _compile(group[:half], scratch, keep) + _compile(group[half:], scratch, keep)
    return [promise for promise in group if not _compiles_alone(promise, problem)]


def _compile_together(group: Sequence[Promise], scratch: Scratch, keep: Keep) -> None:
    with scratch() as folder:
        source = unit_source([promise.kernel for promise in group])
        (folder / SOURCE).write_text(source, encoding="utf-8")
        run_compiler(with_header(group[0].command), folder)
        if not (folder / LIBRARY).is_file():
            raise _NothingWrittenError(f"{group[0].command[0]} succeeds, and writes no library")
        library = keep(folder / LIBRARY)
        functions = [load_function(library, promise.kernel.symbol) for promise in group]
    for promise, function in zip(group, functions, strict=True):
        promise.keep(function)


def _compiles_alone(promise: Promise, problem: Exception) -> bool:
    name = promise.kernel.symbol
    try:
        promise.compiled_alone()
    except (*COMPILER_ERRORS, OSError, ImportError) as error:
        log.debug("%s does not compile: %s\n%s\n%s", name, problem, error, promise.kernel.source)
        promise.problem = str(problem)
        return False
    log.info("%s is compiled by itself: %s", name, str(problem).partition("\n")[0])
    return True
