"""Define the operator by which an exported program calls code compiled to a file.

The caller of the program binds a function to the operator (`bound`), for one call and its thread.
The operator does not search for the file: a program that names one cannot run it by itself.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
ROWS = "?"  # the size of a dimension that equals the first input's number of rows

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define("run_executable(Tensor[] inputs, str sha256, str[] results) -> Tensor[]")
_RESULT = re.compile(r"(\w{1,20})\[([\d,?]{0,400})\]", re.ASCII)
_bound: ContextVar[tuple[str, Run] | None] = ContextVar("ipu_executable", default=None)


@contextmanager
def bound(sha256: str, run: Run) -> Iterator[None]:
    """Let the operator call `run` for the executable with this checksum."""
    token = _bound.set((sha256, run))
    try:
        yield
    finally:
        _bound.reset(token)


def layout(dtype: torch.dtype, shape: Sequence[int | None]) -> str:
    """The type of a result, as the operator has it: `float32[?,8]`."""
    sizes = ",".join(ROWS if size is None else str(size) for size in shape)
    return f"{str(dtype).removeprefix('torch.')}[{sizes}]"


def _run(inputs: Sequence[Tensor], sha256: str, results: Sequence[str]) -> list[Tensor]:
    known = _bound.get()
    if known is None or known[0] != sha256:
        raise RuntimeError(
            f"the executable with the checksum {sha256[:100]!r} is not loaded: load the saved "
            "program that it belongs to with ipu_dynamo.saved_model.load"
        )
    token = _bound.set(None)  # an executable that calls one would be another program
    try:
        values = list(known[1](inputs))
    finally:
        _bound.reset(token)
    check_results(inputs, results, values)
    return values


def check_results(
    inputs: Sequence[Tensor], results: Sequence[str], values: Sequence[Tensor]
) -> None:
    """Raise RuntimeError for values of other types than a program says, for these inputs."""
    expected = _results(inputs, results)
    found = [(value.dtype, tuple(value.shape)) for value in values]
    if found != [(dtype, tuple(shape)) for dtype, shape in expected]:
        raise RuntimeError(f"the executable gives {found}, and the program has {list(results)}")


def _fake(inputs: Sequence[Tensor], sha256: str, results: Sequence[str]) -> list[Tensor]:
    return [inputs[0].new_empty(s, dtype=dtype) for dtype, s in _results(inputs, results)]


def _results(
    inputs: Sequence[Tensor], results: Sequence[str]
) -> list[tuple[torch.dtype, list[int]]]:
    """The types of the results for these inputs."""
    if not inputs:
        raise ValueError("an executable has at least one input")
    return [_result(text, inputs[0]) for text in results]


def _result(text: str, first: Tensor) -> tuple[torch.dtype, list[int]]:
    match = _RESULT.fullmatch(text)
    dtype = getattr(torch, match[1], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text[:100]!r} is no type of a result")
    sizes = [size for size in match[2].split(",") if size]
    if ROWS in sizes and not first.dim():
        raise ValueError("the first input has no rows")
    return dtype, [first.shape[0] if size == ROWS else int(size) for size in sizes]


_library.impl("run_executable", _run, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::run_executable", _fake, lib=_library)
run_executable = torch.ops.ipu.run_executable.default
