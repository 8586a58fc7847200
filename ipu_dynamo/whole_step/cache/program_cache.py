"""Keep programs in a folder of the user's choice, so that the next process runs few passes.

The files in the folder are data: a user who can write them can change the results of a program, but
cannot run code. No verifier checks the host program. So it is taken only from a folder that no
other user can write. From others only the program is taken, and the host passes run again. Compiled
functions are in the package's own folder (`tune/artifact_store.py`).
"""

import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from ipu_dynamo.options import Options
from ipu_dynamo.program import Decision, HostProgram, Program
from ipu_dynamo.program.text.program_text import parse_text
from ipu_dynamo.progress import begin
from ipu_dynamo.replace_file import locked
from ipu_dynamo.saved.archive import FORM, Archive, write_archive
from ipu_dynamo.saved.json_text import expect, fields_of, write_json
from ipu_dynamo.saved.operator_list import check_operators, check_program, write_operators
from ipu_dynamo.saved.refusal import Reason, SavedProgramError
from ipu_dynamo.saved.tensors import TensorMember, read_tensors
from ipu_dynamo.whole_step.cache.ready_made import ReadyMade

log = logging.getLogger("ipu_dynamo.program")
_FIELDS = ("by", "choice", "reason", "function", "of", "count")
_KIND, _END = "cache", ".program"
_LARGEST = 1 << 28  # bytes of a text
_WAIT = 600.0  # seconds for another process that compiles the same program


class ProgramCache:
    """Programs by key in a folder; the oldest are removed when there is no room.

    A fault of the folder or its files costs a compilation, and one line of the log says why.

    Args:
        folder: is made if it is not there.
        limit: bytes of all programs; 0: as many as there are.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self._folder, self._limit = Path(folder), limit

    @classmethod
    def of(cls, options: Options) -> "ProgramCache | None":
        """The cache that options ask for."""
        if not options.program_cache:
            return None
        return cls(options.program_cache, options.program_cache_limit)

    @contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """Wait while another process compiles this program; its lock ends with the process."""
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            file = (self._folder / f".lock-{key[:2]}").open("a+b")
        except OSError:
            yield
            return
        with file:
            end = time.monotonic() + _WAIT
            while not locked(file) and time.monotonic() < end:
                begin("waiting for another process")
                time.sleep(0.05)
            yield

    def find(self, key: str, host_of: Callable[[Program], HostProgram]) -> ReadyMade | None:
        """The program of that key, or None.

        Args:
            host_of: runs the host passes.
        """
        path = self._path(key)
        begin("reading the cache")
        try:
            ready = _read(path, key, None if _is_private(self._folder) else host_of)
        except SavedProgramError as error:
            if error.reason is not Reason.MISSING:
                log.warning("%s\n  the program is compiled again", error)
                with suppress(OSError):
                    path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # the last use
        log.info("the program comes from %s", path)
        return ready

    def keep(self, key: str, ready: ReadyMade) -> None:
        """Write a program for the next process."""
        try:
            _write(self._path(key), key, ready)
            self._make_room()
        except (OSError, ValueError, SavedProgramError) as error:
            log.warning("a program cannot be kept in %s (%s): the next process compiles it again",
                        self._folder, error)  # fmt: skip

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_END}"

    def _make_room(self) -> None:
        """Remove the least recently used programs, down to the limit."""
        if not self._limit:
            return
        files = []
        for path in self._folder.glob(f"*{_END}"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._limit:
                return
            with suppress(OSError):
                path.unlink()
                total -= size


def _write(path: Path, key: str, ready: ReadyMade) -> None:
    program, inlined = ready.host.program.text(), ready.host.inlined.text()
    members: dict[str, bytes | TensorMember] = {
        "program.txt": program.encode("ascii"),
        "operators.json": write_json(write_operators([ready.host.program, ready.host.inlined])),
        "names.json": write_json(
            {
                "inputs": list(ready.input_names),
                "values": list(ready.names),
                "gradients": list(ready.gradients),
                "anchors": dict(ready.anchors),
                "decisions": [_written(decision) for decision in ready.host.decisions],
            }
        ),
        "constants.safetensors": TensorMember(
            {name: tensor.contiguous() for name, tensor in ready.constants.items()}
        ),
        "strides.json": write_json({n: list(t.stride()) for n, t in ready.constants.items()}),
    }
    if inlined != program:
        members["inlined.txt"] = inlined.encode("ascii")
    write_archive(path, members, {"kind": _KIND, "key": key})


def _is_private(folder: Path) -> bool:
    """Whether only this user can write a folder; if others can, one line of the log says so."""
    if not hasattr(os, "geteuid"):
        return True  # Windows: the folder inherits the access list of the user's profile
    try:
        status = folder.stat()
    except OSError:
        return False
    mode = stat.S_IMODE(status.st_mode)
    private = status.st_uid == os.geteuid() and not mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not private:
        _say_once(
            f"{folder} belongs to user {status.st_uid} and has mode {mode:04o}: others may write "
            "it, so that programs from there are checked again"
        )
    return private


@cache
def _say_once(line: str) -> None:
    log.warning("%s", line)


def _read(path: Path, key: str, host_of: Callable[[Program], HostProgram] | None) -> ReadyMade:
    with Archive(path, oldest=FORM) as archive, archive.part("manifest.json"):
        head = fields_of(archive.head, "the head", kind=str, key=str)
        if head != [_KIND, key]:
            raise SavedProgramError(Reason.CLIENT, "it is another program")
        operators = check_operators(archive.read_json("operators.json", _LARGEST))
        inputs, values, gradients, anchors, written = fields_of(
            archive.read_json("names.json", _LARGEST), "names", inputs=list, values=list,
            gradients=list, anchors=dict, decisions=list,
        )  # fmt: skip
        constants = read_tensors(archive, "constants.safetensors")
        strides = expect(archive.read_json("strides.json", _LARGEST), dict, "strides")
        for name, stride in strides.items():
            constants[name] = _strided(constants[name], stride)
        program = _parsed(archive, "program.txt", constants, operators, Program.parse)
        inlined = program
        if host_of is None and "inlined.txt" in archive.names:
            inlined = _parsed(archive, "inlined.txt", constants, operators, _unverified)
    if host_of is None:
        host = HostProgram(program, inlined, decisions=tuple(map(_decision, written)))
    else:
        host = host_of(program)
    return ReadyMade(
        host,
        constants,
        _strings(inputs),
        names=_strings(values),
        gradients=_strings(gradients),
        anchors=dict(zip(anchors, _strings(list(anchors.values())), strict=True)),
    )


def _written(decision: Decision) -> list[str | int]:
    """A decision that was taken without figures, as JSON."""
    return [getattr(decision, name) for name in _FIELDS]


def _decision(written: object) -> Decision:
    fields = expect(written, list, "a decision")
    if len(fields) != len(_FIELDS):
        raise SavedProgramError(Reason.CONTENT, "a decision of other fields")
    *texts, count = fields
    by, choice, reason, function, of = (expect(text, str, "a decision") for text in texts)
    return Decision(by, choice, reason, function, of, expect(count, int, "a number"))


def _strings(values: list[object]) -> tuple[str, ...]:
    return tuple(expect(value, str, "a name") for value in values)


def _unverified(text: str, constants: Mapping[str, torch.Tensor]) -> Program:
    return parse_text(text, Program, constants)


def _parsed(
    archive: Archive,
    name: str,
    constants: Mapping[str, torch.Tensor],
    operators: frozenset[str],
    parse: Callable[[str, Mapping[str, torch.Tensor]], Program],
) -> Program:
    """A program in a file."""
    with archive.part(name):
        try:
            program = parse(archive.read(name, _LARGEST).decode("ascii"), constants)
        except ValueError as error:
            raise SavedProgramError(Reason.CONTENT, str(error)) from error
        check_program(program, operators)
    return program


def _strided(tensor: torch.Tensor, stride: object) -> torch.Tensor:
    """A dense tensor, laid out as it was."""
    if stride == list(tensor.stride()):
        return tensor
    try:
        empty = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)  # type: ignore[arg-type]
    except (RuntimeError, TypeError) as error:
        raise SavedProgramError(Reason.CONTENT, f"strides that cannot be: {error}") from error
    return empty.copy_(tensor)
