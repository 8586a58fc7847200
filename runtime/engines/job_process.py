"""Let a second Python process do jobs for this one, and make sure that it ends with this one.

PyTorch's `SubprocPool` does not serve. It starts two processes for one worker. The first forks a
new worker for one that died, when it has threads itself. It outlives its parent while a process
that the parent has forked holds the pipe.
"""

import os
import pickle
import select
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

# `import sys` reads no file; before the next import `sys.path` is the one of the parent.
_BEGIN = """
import sys
sys.path[:] = sys.argv[2:]
from ipu_dynamo.runtime.engines.job_process import serve
serve(int(sys.argv[1]))
"""

_Surroundings = tuple[dict[str, str], list[str], str | None]


class CannotStart(Exception):
    """No second process can be started from this one."""


class ProcessDied(Exception):
    """The process has ended before it has answered; the text says how."""


class JobFailed(Exception):
    """The job has raised an exception, whose class and words are the text.

    Args:
        details: its traceback.
    """

    def __init__(self, text: str, details: str) -> None:
        super().__init__(text)
        self.details = details


class JobProcess:
    """A Python process that does one job after the other.

        process = JobProcess()
        process.ask("package.module:function", message)
        result = process.answer()  # of function(message), called there
        process.stop()

    It starts from nothing: it has no thread, module or file of this process, and does not import
    the `__main__` of the user. Ctrl-C does not reach it. It ends when this process ends, also in
    the middle of a job. A process that is forked from this one does not keep it alive, and cannot
    use it. One thread uses an object at a time.

    Raises:
        CannotStart
    """

    def __init__(self) -> None:
        own, other = _pipe()
        with other:
            try:
                self._process = _start(other.fileno())
            except BaseException:
                own.close()
                raise
        self._own, self._owner, self._asked = own, os.getpid(), False
        self._end = weakref.finalize(self, _end, self._process, own, self._owner)
        _connections.add(own)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, job: str, message: object) -> None:
        """Let the process do a job: call a function, `module:name`, with a message.

        The message and the result are pickled. The function finds the environment variables, the
        import path and the current folder that this process has now.

        Raises:
            ProcessDied
        """
        assert not self._asked, "an answer is outstanding"
        data = pickle.dumps((_identity(), _surroundings(), job, pickle.dumps(message)))
        self._talk(lambda: self._own.send_bytes(data))
        self._asked = True

    def ready(self, seconds: float = 0.0) -> bool:
        """Wait for so long at most; return whether `answer` will not wait."""
        with suppress(OSError):
            return self._own.poll(seconds)
        return True

    def answer(self) -> Any:
        """Wait for the result of the job.

        Raises:
            JobFailed
            ProcessDied
        """
        assert self._asked, "nothing was asked"
        self._asked = False
        result, failure = pickle.loads(self._talk(self._own.recv_bytes))
        if failure is not None:
            raise JobFailed(*failure)
        return pickle.loads(result)

    def kill(self) -> None:
        """End the process now. Any thread may call this; one that waits gets `ProcessDied`."""
        if os.getpid() == self._owner:
            self._process.kill()

    def stop(self) -> None:
        """End the process now, and wait for its end."""
        self._end()

    def _talk(self, step: Callable[[], Any]) -> Any:
        """Send or receive. Half a message is of no use, so an interrupt ends the process."""
        if self._own.closed:
            raise ProcessDied("the process was stopped, or belongs to another one")
        try:
            return step()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):  # its files close before it has a status
                self._process.wait(1)
            status = self._process.poll()
            self.stop()
            raise ProcessDied(f"process {self.pid} has ended with status {status}") from error
        except BaseException:
            self.stop()
            raise


def serve(descriptor: int) -> None:
    """Do jobs until the other end of the connection closes; the process runs this."""
    threading.Thread(target=_exit_with_parent, args=(descriptor,), daemon=True).start()
    connection = Connection(descriptor)
    while True:
        try:
            asked = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        result = failure = None
        try:
            result = pickle.dumps(_do(*pickle.loads(asked)))
        except Exception as error:
            failure = f"{type(error).__name__}: {error}", traceback.format_exc()
        connection.send_bytes(pickle.dumps((result, failure)))


def _do(identity: object, surroundings: _Surroundings, job: str, message: bytes) -> Any:
    if identity != _identity():
        raise RuntimeError(f"another interpreter or package: {_identity()}, not {identity}")
    variables, path, folder = surroundings
    if variables != dict(os.environ):
        os.environ.clear()
        os.environ.update(variables)
    sys.path[:] = path
    if folder is not None:
        os.chdir(folder)
    return resolve_name(job)(pickle.loads(message))


def _exit_with_parent(descriptor: int) -> None:
    """End as soon as the other end closes: a poll for no event waits for just that."""
    poller = select.poll()
    poller.register(descriptor, 0)
    poller.poll()
    os._exit(1)


def _start(descriptor: int) -> "subprocess.Popen[bytes]":
    name = Path(sys.executable or "").name
    # The executable of an application that embeds Python would be the application once more.
    if not name.startswith("python") or getattr(sys, "frozen", False):
        raise CannotStart(f"{sys.executable!r} may be no interpreter of Python")
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _BEGIN, str(descriptor), *_surroundings()[1]],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C comes to the parent alone
        )
    except (OSError, ValueError) as error:
        raise CannotStart(f"{sys.executable} does not start: {error}") from error


def _pipe() -> tuple[Connection, Connection]:
    """Return two connected ends. None is a standard stream, even where these are closed."""
    if sys.platform == "win32":
        raise CannotStart("the system has no processes in groups")
    import fcntl

    ends = []
    for end in Pipe():
        with end:
            ends.append(Connection(fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)))
    return ends[0], ends[1]


def _identity() -> tuple[str, str]:
    return sys.version, os.path.realpath(__file__)


def _surroundings() -> _Surroundings:
    """Environment variables, import path and current folder; None if that was removed."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        path = [entry for entry in sys.path if os.path.isabs(entry)]
        return dict(os.environ), path, None
    return dict(os.environ), [os.path.join(folder, entry) for entry in sys.path], folder


def _end(process: "subprocess.Popen[bytes]", own: Connection, owner: int) -> None:
    own.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()


def _close_copies() -> None:
    """Close the connections in a forked process: else no process notices the end of this one."""
    for connection in list(_connections):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)
