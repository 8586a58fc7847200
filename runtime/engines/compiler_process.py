"""Run a compiler that never outlives this process."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Kills the whole group, the compiler's own children among it, when Python's end of the pipe closes,
# which it also does where Python is killed.
_GUARD = """
exec 3<&0
"$@" </dev/null 3<&- &
compiler=$!
(read -r _ <&3; kill -9 0) </dev/null >/dev/null 2>&1 &
guard=$!
exec 3<&-
wait "$compiler"
status=$?
kill -9 "$guard"
exit "$status"
"""


class CompilerFailed(Exception):
    """A compiler did not end well; its output is the message."""


def run_compiler(command: Sequence[str], folder: Path) -> None:
    """Run a command in `folder`, where its temporary files go, too. It speaks English.

    Raises:
        CompilerFailed: it is not there, or has failed.
        OSError: no process can be started, or nothing written.
    """
    with tempfile.TemporaryFile(dir=folder) as printed:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder), "LC_ALL": "C"},
            start_new_session=True,  # Ctrl-C comes to Python alone, which ends the others
        )
        try:
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            assert process.stdin is not None
            process.stdin.close()
        if status:
            printed.seek(0)
            text = printed.read().decode(errors="replace")
            raise CompilerFailed(f"{command[0]} has ended with status {status}\n{text}")


def compiler_says(command: str, argument: str) -> str:
    """Return a compiler's output about itself; an empty string if it is missing or fails."""
    try:
        done = subprocess.run([command, argument], capture_output=True, text=True, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout
