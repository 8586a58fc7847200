"""Run a saved program that calls an executable."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from ipu_dynamo.ops.library.run_executable import bound, run_executable
from ipu_dynamo.saved_model.conversion.executable.direct_call import DirectCall, direct_call
from ipu_dynamo.saved_model.conversion.executable.open_executable import Executable, compiled_nodes
from ipu_dynamo.saved_model.exported.flat_program import FlatProgram, Watch


class Bound:
    """Runs a program whose nodes of IPUs are an executable.

    The file is read and compiled by the first run; nothing is compiled after it.

    Args:
        path: of the executable.
    """

    def __init__(self, program: ExportedProgram, path: Path) -> None:
        self._program, self._path, self._digest = program, path, called(program, path)
        self._host: FlatProgram | None = None
        self._direct: DirectCall | None = None
        self._executable: Executable | None = None

    def run(self, inputs: Sequence[Any], watch: Watch | None = None) -> list[Any]:
        """All user outputs, by position."""
        if self._executable is None:
            self._executable = Executable(self._path, self._digest)
            self._host, self._direct = FlatProgram(self._program), direct_call(self._program)
        if self._direct is not None and watch is None:
            return self._direct.run(self._executable.run, inputs)
        assert self._host is not None
        with bound(self._digest, self._executable.run):
            return self._host.run(inputs, watch)

    def close(self) -> None:
        """Free the file's content and the compiled code."""
        if self._executable is not None:
            self._executable.close()
        self._executable = self._host = None


def bind(program: ExportedProgram, folder: Path, executable: str) -> Bound:
    """Make a runner of a program.

    Args:
        folder: where the program is.
        executable: the path in its index.

    Raises:
        ValueError: the program calls none, or several.
    """
    return Bound(program, _path(folder, executable))


def nodes_behind(program: ExportedProgram, folder: Path, executable: str) -> list[dict[str, Any]]:
    """The nodes that the executable of a program was made of, as `show --nodes` lists nodes.

    Raises:
        ValueError: the program calls none, or several.
        RuntimeError: the file is missing, another one, or damaged.
    """
    path = _path(folder, executable)
    return compiled_nodes(path, called(program, path))


def _path(folder: Path, executable: str) -> Path:
    """Where an executable is: inside of the folder, or at an absolute path."""
    path = folder / executable
    if not Path(executable).is_absolute() and ".." in Path(executable).parts:
        raise ValueError(f"executable {executable!r} leads out of {folder}")
    return path


def called(program: ExportedProgram, path: Path) -> str:
    """The checksum of the executable that a program calls."""
    calls = program.graph.find_nodes(op="call_function", target=run_executable)
    sums = {str(node.args[1]) for node in calls}
    if len(sums) != 1 or len(calls) != 1:
        raise ValueError(f"the program calls {len(calls)} executables, and its index names {path}")
    return sums.pop()
