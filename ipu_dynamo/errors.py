"""Say what is wrong, where in the user's model, and what to try.

`python -m ipu_dynamo.errors ID` prints what the guide says about errors of a kind.
"""

import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)\n +(.+)')
_MODULE = re.compile(r'Module "([^"\n]*)" of class (\w+)\n')  # in place of frames
_skipped: ContextVar[tuple[str, ...] | None] = ContextVar("files that are skipped", default=None)
_HERE = Path(__file__).parent
_OWN = tuple(
    f"{folder}{os.sep}"
    for folder in (
        _HERE,
        _HERE.parent / "passes",
        _HERE.parent / "runtime",
        _HERE.parent / "poptorch",
    )
)
_PYTHON = f"{Path(traceback.__file__).parent}{os.sep}"
_PACKAGES = ("site-packages", "dist-packages")  # which lie in it
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_NAMED_RANKS = 4  # in an error
NO_LINE = "unknown source"  # in place of a line of the user's model
_OF_A_TRACE = ("<string>", "1", "<lambda>", "")  # a function that PyTorch makes of text


class IpuError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        text: the message.
        id: which kind of error this is; None: that of the class.

    Attributes:
        id: which kind of error this is; it stays the same from version to version, and
            `python -m ipu_dynamo.errors ID` prints the section of the guide for it.
        rank, host: of the process that met the error, if another one did or another one's is
            raised here, too; else None.
    """

    id: str = "call"
    rank: int | None = None
    host: str | None = None

    def __init__(self, text: str, *, id: str | None = None) -> None:
        super().__init__(text)
        if id is not None:
            self.id = id
        self.add_note(guide_note(self.id))


def guide_note(id: str) -> str:
    """Where the guide explains errors of a kind, as a note of the error."""
    return f"error id {id}: python -m ipu_dynamo.errors {id} says more"


class OptionError(IpuError, ValueError):
    """An option does not exist or has a value that it cannot have."""

    id = "option"


class CompileError(IpuError):
    """The model cannot be compiled as written.

    Args:
        problem: one clause with its numbers and units; lower case, no full stop.
        node: the operator at fault; its source line is quoted.
        where: the source line, when there is no node.
        hint: an action that the user can take today.
        id: the kind of error, where it is none of the class.
    """

    id = "model"

    def __init__(
        self,
        problem: str,
        *,
        node: fx.Node | None = None,
        where: str = "",
        hint: str = "",
        id: str | None = None,
    ) -> None:
        lines = [problem]
        if node is not None:
            lines.append(f"  node: %{node.name} = {node.target}")
            where = where or source_line(node)
        if where:
            lines.append(f"  from: {where}")
        if hint:
            lines.append(f"  try:  {hint}")
        super().__init__("\n".join(lines), id=id)
        self.problem = problem


class OutOfMemory(CompileError):  # the name that PopTorch's users know
    """The program does not fit in the memory of the IPUs that the user asks for."""

    id = "out-of-memory"


class ProgramError(IpuError, ValueError):
    """A program cannot run as it reads: a pass, or whoever wrote its text, made a mistake.

    Args:
        problem: one clause that names what is wrong.
        instruction: at fault; its text, and its source line if it has one, are quoted.
    """

    id = "program"

    def __init__(self, problem: str, instruction: object = None) -> None:
        lines = [problem]
        if instruction is not None:
            lines.append(f"  in:   {_shown(instruction)}")
            if source := getattr(instruction, "source", ""):
                lines.append(f"  from: {source}")
        super().__init__("\n".join(lines))
        self.problem, self.instruction = problem, instruction


def _shown(instruction: object) -> str:
    """Its line in a program; all its fields where these do not go together."""
    try:
        return str(instruction)
    except ValueError:
        return repr(instruction)


class InputError(IpuError):
    """An argument of a call does not fit the compiled program.

    Args:
        problem: one clause that names the argument, what was expected and what came.
        hint: an action that the user can take today.
    """

    id = "input"

    def __init__(self, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{problem}\n  try:  {hint}" if hint else problem)
        self.problem = problem


class BatchError(IpuError):
    """Batches cannot be made of these data, or not by this process."""

    id = "loader"


class ExecutionError(IpuError):
    """An instruction of a program failed while it ran.

    Args:
        problem: what the operator said.
        stage: index of the stage that failed.
        instruction: text of the instruction, as in the printed program.
        micro_batch: index of the micro-batch within the call, from 0.
        where: the source line behind the operator.
    """

    id = "operator-failed"

    def __init__(
        self, problem: str, *, stage: int, instruction: str, micro_batch: int, where: str
    ) -> None:
        super().__init__(
            f"{problem}\n  stage: {stage}, micro-batch {micro_batch}\n"
            f"  in:    {instruction}\n  from:  {where}"
        )
        self.stage, self.instruction = stage, instruction
        self.micro_batch, self.where = micro_batch, where


class NonFiniteNorm(IpuError, RuntimeError):
    """The norm of a step's gradients is not finite, and clipping was told to refuse that.

    Weights, buffers and optimiser state are those after the last complete step.
    """

    id = "clip"

    def __init__(self, norm: float, norm_type: float) -> None:
        super().__init__(
            f"the total norm of order {norm_type:g} of the gradients is {norm}, so they cannot be "
            "clipped\n  try:  error_if_nonfinite=False scales them by it all the same"
        )


class UpdateNotTraced(IpuError):
    """The numbers of the next step need an update that was not traced.

    Args:
        problem: one clause.
        hint: an action that the user can take today.
    """

    id = "update"

    def __init__(self, problem: str, *, hint: str) -> None:
        super().__init__(f"{problem}\n  try:  {hint}")


class UpdateError(IpuError):
    """An update failed half-way: weights and the optimiser's state are not those of any step.

    Every call raises it until they are written anew.

    Args:
        problem: one clause that names what may have been written.
        hint: an action that the user can take today.
    """

    id = "update-failed"

    def __init__(self, problem: str, *, hint: str) -> None:
        super().__init__(f"{problem}\n  try:  {hint}")
        self.problem = problem


class RankFailed(IpuError):
    """Another rank failed, so this one did not complete the step, the call or the compilation.

    Args:
        problem: one clause that names what the rank met.
        rank, host: of that rank.
    """

    id = "rank-failed"

    def __init__(self, problem: str, *, rank: int, host: str) -> None:
        super().__init__(f"{problem}\n  rank: {rank} ({host})")
        self.problem, self.rank, self.host = problem, rank, host


class RankLost(IpuError):
    """A rank that others wait for is gone. No further operation of its mesh is possible.

    Weights and optimiser states are those of the last complete step.

    Args:
        problem: one clause that names the rank and what is known of it.
        rank, host: of that rank, if they are known.
    """

    id = "rank-lost"

    def __init__(self, problem: str, *, rank: int | None = None, host: str | None = None) -> None:
        line = "" if rank is None else f"\n  rank: {rank}" + (f" ({host})" if host else "")
        super().__init__(problem + line)
        self.problem, self.rank, self.host = problem, rank, host


class RanksDiffer(IpuError):
    """Ranks have different values of something that must be the same on all.

    Args:
        problem: one clause that names it.
        values: of each rank, as text.
        hint: an action that the user can take today.
    """

    id = "ranks-differ"

    def __init__(self, problem: str, values: Mapping[int, str], *, hint: str = "") -> None:
        ranks: dict[str, list[int]] = {}
        for rank, value in sorted(values.items()):
            ranks.setdefault(value, []).append(rank)
        lines = [problem, *(f"  {_ranks(of)}: {value}" for value, of in ranks.items())]
        super().__init__("\n".join([*lines, f"  try:  {hint}"] if hint else lines))
        self.problem, self.values = problem, dict(values)


def _ranks(numbers: Sequence[int]) -> str:
    """Name ascending ranks, the first few of many: `ranks 0, 1, 2 and 61 more`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    named = ", ".join(map(str, numbers[:_NAMED_RANKS]))
    more = len(numbers) - _NAMED_RANKS
    return f"ranks {named} and {more} more" if more > 0 else f"ranks {named}"


def source_line(node: fx.Node) -> str:
    """The innermost user frame of `node`, as `model.py:12 in forward: return x @ self.w`; without
    one the module that calls it, as `encoder.0: Linear`."""
    trace = node.meta.get("stack_trace") or ""
    if (module := _MODULE.search(trace)) is not None:
        return ": ".join(filter(None, module.groups()))
    return _innermost(_FRAME.findall(trace))


def raised_at(trace: TracebackType | None) -> str:
    """The innermost user frame of an exception's traceback, in the form of `source_line`."""
    frames = traceback.extract_tb(trace)
    return _innermost([(f.filename, str(f.lineno), f.name, f.line or "") for f in frames])


def called_from() -> str:
    """The user frame that led here, in the form of `source_line`."""
    frames = traceback.extract_stack()
    return _innermost([(f.filename, str(f.lineno), f.name, f.line or "") for f in frames])


@contextmanager
def skipping_sources(parts: Sequence[str] | None) -> Iterator[None]:
    """Take lines of files with one of these parts in their names for a library's, as this project's
    are, and those of all others for the user's; None: PyTorch's are a library's, too."""
    token = _skipped.set(None if parts is None else tuple(parts))
    try:
        yield
    finally:
        _skipped.reset(token)


def keep_user_line(node: fx.Node) -> None:
    """Let `node` know of one line only, where files are skipped, for whoever asks for it later."""
    if _skipped.get() is not None and (
        frames := _FRAME.findall(node.meta.get("stack_trace") or "")
    ):
        file, line, function, text = _user_frame(frames)
        node.meta["stack_trace"] = f'  File "{file}", line {line}, in {function}\n    {text}\n'


def module_trace(path: str, kind: str) -> str:
    """What stands in place of a stack trace, so that `source_line` names a module.

    Args:
        path: in the user's model; empty: the model.
        kind: the name of its class.
    """
    return f'  Module "{path}" of class {kind}\n'


def note_module(node: fx.Node, path: str, kind: str) -> None:
    """Let `node` be known by the module that calls it, if no line of the user's does."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if all(is_library(frame[0]) for frame in frames):
        node.meta["stack_trace"] = module_trace(path, kind)


def is_library(file: str) -> bool:
    """Whether a file is Python's, PyTorch's or this project's, or skipped, and not the user's."""
    if file.startswith(_PYTHON) and not any(part in file for part in _PACKAGES):
        return True
    skipped = _skipped.get()
    more = file.startswith(_TORCH) if skipped is None else any(part in file for part in skipped)
    return more or file.startswith(_OWN)


_Frame = tuple[str, str, str, str]  # file, line, function, text


def _user_frame(frames: Sequence[_Frame]) -> _Frame:
    """The innermost of the user's frames; of all, where there is none."""
    users = [frame for frame in frames if not is_library(frame[0]) and frame != _OF_A_TRACE]
    return (users or frames)[-1]


def _innermost(frames: Sequence[_Frame]) -> str:
    if not frames:
        return NO_LINE
    file, line, function, text = _user_frame(frames)
    return f"{Path(file).name}:{line} in {function}: {text.strip()}"


def _guide() -> dict[str, str]:
    """The sections of the guide's page on errors by id, in its order."""
    for page in (_HERE / "guide" / "errors.md", _HERE.parent / "docs" / "errors.md"):
        if page.is_file():  # in an installed package, and in a checkout
            parts = re.split(r"^## (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
            return {id: text.strip() for id, text in zip(parts[1::2], parts[2::2], strict=True)}
    return {}


def main(arguments: Sequence[str]) -> int:
    """Print the section of one kind of errors; exit with 2 where there is no such one."""
    sections = _guide()
    if len(arguments) != 1:
        print(f"usage: python -m ipu_dynamo.errors ID\nIDs: {', '.join(sections)}", file=sys.stderr)
        return 2
    (id,) = arguments
    if id not in sections:
        near = get_close_matches(id, sections, n=3)
        which = f"did you mean: {', '.join(near)}?" if near else f"there are {', '.join(sections)}"
        print(f"error: there is no error id {id!r}; {which}", file=sys.stderr)
        return 2
    print(f"## {id}\n\n{sections[id]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
