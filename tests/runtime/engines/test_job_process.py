"""Check that a process does jobs as if this one did them, and never outlives this one."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipu_dynamo.runtime.engines.job_process import CannotStart, JobFailed, JobProcess, ProcessDied

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"
)
ROOT = Path(__file__).resolve().parents[3]
# A program that lets a process sleep for long, after writing its number to a file.
BEGIN = """
import os, signal, sys, time
from pathlib import Path
from ipu_dynamo.runtime.engines.job_process import JobProcess, ProcessDied
process = JobProcess()
process.ask("time:sleep", 1000)
def said(text):
    part = Path(sys.argv[1] + ".part")
    part.write_text(f"{process.pid} {text}")
    part.rename(sys.argv[1])
"""


@pytest.fixture
def process():
    process = JobProcess()
    yield process
    process.stop()


def test_answers_one_job_after_the_other(process):
    process.ask("os.path:basename", "/a/b")
    assert process.answer() == "b"
    process.ask("builtins:sorted", [3, 1, 2])
    assert process.ready(120)
    assert process.answer() == [1, 2, 3]


def test_a_job_finds_the_surroundings_of_its_time(process, tmp_path, monkeypatch):
    (tmp_path / "later.py").write_text(
        "import os\ndef look(name): return os.environ.get(name), os.getcwd()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_LATER", "yes")
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    process.ask("later:look", "SET_LATER")
    assert process.answer() == ("yes", str(tmp_path))
    monkeypatch.delenv("SET_LATER")
    monkeypatch.chdir("/")
    process.ask("later:look", "SET_LATER")
    assert process.answer() == (None, "/")


def test_a_job_that_raises_leaves_the_process_alive(process):
    process.ask("math:sqrt", -1.0)
    with pytest.raises(JobFailed, match="ValueError: math domain error") as caught:
        process.answer()
    assert "Traceback" in caught.value.details
    process.ask("math:sqrt", 4.0)
    assert process.answer() == 2.0


def test_a_message_that_the_process_cannot_read_is_an_error(process):
    process.ask("builtins:repr", _Unreadable())
    with pytest.raises(JobFailed, match="cannot be read"):
        process.answer()


class _Unreadable:
    def __reduce__(self):
        return _fail, ()


def _fail():
    raise ValueError("it cannot be read")


def test_notices_the_end_of_the_process(process):
    process.ask("os:_exit", 3)
    with pytest.raises(ProcessDied, match="ended with status 3"):
        process.answer()
    with pytest.raises(ProcessDied):
        process.ask("os:_exit", 3)


def test_notices_a_killed_process(process):
    process.ask("time:sleep", 1000)
    os.kill(process.pid, signal.SIGKILL)
    assert process.ready(120)
    with pytest.raises(ProcessDied, match="ended with status -9"):
        process.answer()


def test_an_interrupt_ends_the_process(process):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        process.ask("time:sleep", 1000)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            process.answer()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not _is_alive(process.pid)


def test_takes_no_application_for_an_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/usr/bin/true")
    with pytest.raises(CannotStart, match="may be no interpreter"):
        JobProcess()
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    with pytest.raises(CannotStart, match="does not start"):
        JobProcess()


@pytest.mark.parametrize(
    "end",
    [
        "said(''); sys.exit(0)",
        "said(''); raise ValueError",
        "said(''); os._exit(0)",
        "said(''); os.kill(os.getpid(), signal.SIGKILL)",
        "said(''); os.kill(os.getpid(), signal.SIGINT); time.sleep(1000)",
        "said(''); os.kill(os.getpid(), signal.SIGTERM); time.sleep(1000)",
    ],
)
def test_ends_with_its_parent_however_that_ends(tmp_path, end):
    pid, _ = _run(tmp_path, BEGIN + end)
    assert _ends(pid)


def test_ctrl_c_at_a_terminal_reaches_the_parent_alone(tmp_path):
    """The terminal signals the group of the parent."""
    program = BEGIN + (
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "os.killpg(os.getpgrp(), signal.SIGINT)\n"
        "said('ended' if process.ready(1.0) else 'works')\n"
    )
    assert _run(tmp_path, program, start_new_session=True)[1] == "works"


def test_a_forked_process_that_lives_on_does_not_keep_it_alive(tmp_path):
    program = BEGIN + "said('')\nif os.fork(): os._exit(0)\ntime.sleep(1000)\n"
    session = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "said")],
        cwd=ROOT,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        pid, _ = _what_was_said(tmp_path)
        session.wait(120)
        assert _ends(pid)
    finally:
        for member in _session(session.pid):
            os.kill(member, signal.SIGKILL)


def test_a_forked_process_can_neither_use_nor_end_it(tmp_path):
    program = BEGIN + (
        "if not os.fork():\n"
        "    try:\n"
        "        process.answer()\n"
        "    except ProcessDied:\n"
        "        process.stop()\n"
        "        sys.exit(0)\n"
        "    process.ready(1000)\n"
        "os.wait()\n"
        "said('ended' if process.ready(0.5) else 'works')\n"
    )
    assert _run(tmp_path, program)[1] == "works"


@pytest.mark.parametrize("how", ["file", "stdin", "closed streams"])
def test_starts_from_any_program_and_does_not_run_it_again(tmp_path, how):
    program = (
        "import sys\n"
        f"with open({str(tmp_path / 'runs')!r}, 'a') as file: file.write('x')\n"
        "from ipu_dynamo.runtime.engines.job_process import JobProcess\n"
        "process = JobProcess()\n"
        "process.ask('math:sqrt', 4.0)\n"
        "sys.exit(0 if process.answer() == 2.0 else 1)\n"
    )
    (tmp_path / "program.py").write_text(program)
    command, environment = [sys.executable, "program.py"], os.environ | {"PYTHONPATH": str(ROOT)}
    given = None
    if how == "stdin":
        command, given = [sys.executable], program
    elif how == "closed streams":
        command = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *command]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, input=given, text=True, timeout=120
    )
    assert done.returncode == 0
    assert (tmp_path / "runs").read_text() == "x"


def test_starts_in_a_daemon_of_multiprocessing():
    context = multiprocessing.get_context("spawn")
    daemon = context.Process(target=_as_daemon, daemon=True)
    daemon.start()
    daemon.join(120)
    assert daemon.exitcode == 0


def _as_daemon():
    process = JobProcess()
    process.ask("math:sqrt", 4.0)
    assert process.answer() == 2.0


def _run(folder, program, **options):
    """The number of the process that a program started, and the text that it wrote."""
    command = [sys.executable, "-c", program, str(folder / "said")]
    started = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, **options)
    try:
        started.wait(120)
        return _what_was_said(folder)
    finally:
        started.kill()


def _what_was_said(folder):
    for _ in range(2400):
        if (folder / "said").exists():
            pid, text = (folder / "said").read_text().split(" ", 1)
            return int(pid), text
        time.sleep(0.05)
    raise AssertionError("nothing was said")


def _session(leader):
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            yield int(folder.name)


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _ends(pid):
    for _ in range(1200):
        if not _is_alive(pid):
            return True
        time.sleep(0.05)
    return False
