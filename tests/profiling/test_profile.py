"""Check when `ipu_dynamo.profile` writes its file, where, and what it refuses."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ipu_dynamo
from ipu_dynamo import IpuError
from ipu_dynamo.profiling import recording
from ipu_dynamo.profiling.recording import span
from tests.profiling.strict_reader import read_trace
from tests.ranks.mesh import world

ROOT = Path(__file__).resolve().parents[2]
IN_PROCESS = """
import os, sys, threading
from multiprocessing import get_context
from ipu_dynamo.profiling.recording import span

def work(name):
    with span(name, "c"):
        pass

if __name__ == "__main__":
    if "spawn" in sys.argv:
        child = get_context("spawn").Process(target=work, args=("child",))
        child.start()
        child.join()
    if "fork" in sys.argv and not (child := os.fork()):
        work("fork")
        sys.exit()
    elif "fork" in sys.argv:
        os.waitpid(child, 0)
    work("main")
    if "interrupt" in sys.argv:
        raise KeyboardInterrupt
"""


def names(file):
    return [one["name"] for one in read_trace(file).spans]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_file_is_written_also_after_an_error(error, tmp_path):
    file = tmp_path / "folder" / "trace.json"

    def fail():
        with span("first", "c"):
            pass
        with span("second", "c"):
            raise error

    with pytest.raises(error), ipu_dynamo.profile(file):
        fail()
    assert names(file) == ["first", "second"]
    assert recording.active == ()
    assert [one.name for one in file.parent.iterdir()] == ["trace.json"]


def test_the_file_is_written_after_an_interrupt(tmp_path):
    file = tmp_path / "trace.json"
    with pytest.raises(KeyboardInterrupt), ipu_dynamo.profile(file), span("waiting", "c"):
        signal.raise_signal(signal.SIGINT)
    assert names(file) == ["waiting"]


def test_an_empty_block_is_a_trace(tmp_path):
    with ipu_dynamo.profile(tmp_path / "trace.json"):
        pass
    assert names(tmp_path / "trace.json") == []


def test_nested_blocks_have_what_each_of_them_did(tmp_path):
    outer, inner = tmp_path / "outer.json", tmp_path / "inner.json"
    with ipu_dynamo.profile(outer):
        with span("a", "c"):
            pass
        with ipu_dynamo.profile(inner), span("b", "c"):
            pass
        with span("c", "c"):
            pass
    assert names(outer) == ["a", "b", "c"]
    assert names(inner) == ["b"]


def test_blocks_of_two_threads_overlap(tmp_path):
    began, over = threading.Event(), threading.Event()

    def other():
        with ipu_dynamo.profile(tmp_path / "other.json"):
            began.set()
            over.wait(60)

    thread = threading.Thread(target=other)
    with ipu_dynamo.profile(tmp_path / "main.json"):
        with span("a", "c"):
            pass
        thread.start()
        assert began.wait(60)
        with span("b", "c"):
            pass
        over.set()
        thread.join()
    assert names(tmp_path / "main.json") == ["a", "b"]
    assert names(tmp_path / "other.json") == ["b"]


def test_one_file_for_two_blocks_at_once_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ipu_dynamo.profile("trace.json"):
        with (
            pytest.raises(IpuError, match=r"trace\.json .*has not ended yet\n  try:  another file"),
            ipu_dynamo.profile(tmp_path / "trace.json"),
        ):
            raise AssertionError
        with span("a", "c"):
            pass
    assert names(tmp_path / "trace.json") == ["a"]
    with ipu_dynamo.profile("trace.json"):  # it has ended now
        pass
    assert names(tmp_path / "trace.json") == []


def test_a_file_that_cannot_be_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "trace.json"):
        with pytest.raises(OSError), ipu_dynamo.profile(path):  # noqa: PT011
            raise AssertionError
    assert recording.active == ()


def test_the_error_of_the_block_goes_before_that_of_the_file(tmp_path):
    folder = tmp_path / "folder"

    def fail():
        folder.rmdir()
        raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the") as caught, ipu_dynamo.profile(folder / "t"):
        fail()
    assert "could not be written" in caught.value.__notes__[0]
    with pytest.raises(FileNotFoundError), ipu_dynamo.profile(folder / "t"):
        folder.rmdir()


def test_each_rank_has_a_file_with_its_number(tmp_path):
    for rank in (0, 3):
        with world(4, rank=rank), ipu_dynamo.profile(tmp_path / "trace.json"), span("a", "c"):
            pass
    assert {one.name for one in tmp_path.iterdir()} == {"trace.rank0.json", "trace.rank3.json"}
    assert names(tmp_path / "trace.rank3.json") == ["a"]


def run(folder, *arguments, **variables):
    script = folder / "script.py"
    script.write_text(IN_PROCESS)
    environment = os.environ | {"IPU_DYNAMO_TRACE": "t.json", "PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, str(script), *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, timeout=120, check=False)
    return ended.returncode


@pytest.mark.slow
def test_a_variable_records_the_process_and_those_that_it_starts(tmp_path):
    assert run(tmp_path, "spawn", "fork") == 0
    assert names(tmp_path / "t.json") == ["main"]
    (child,) = tmp_path.glob("t.process*.json")
    assert names(child) == ["child"]


@pytest.mark.slow
def test_a_variable_records_ranks_and_processes_that_end_by_an_interrupt(tmp_path):
    assert run(tmp_path, "interrupt", RANK="1", WORLD_SIZE="2") != 0
    assert names(tmp_path / "t.rank1.json") == ["main"]
