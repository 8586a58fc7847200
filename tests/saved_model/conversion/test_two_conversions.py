"""Convert twice at the same time into one folder: both are right, or one says what is wrong."""

import fcntl
import os
import subprocess
import sys

import pytest

from ipu_dynamo.saved_model import load
from ipu_dynamo.saved_model.files.locked_folder import locked_folder
from tests.saved_model.conversion.slow_conversions import convert_slowly
from tests.saved_model.converting import assert_like, save_branches
from tests.saved_model.prepared_processes import prepared


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "saved"
    return folder, save_branches(folder)


def both(*arguments):
    """What two conversions at the same time tell."""
    context = prepared()
    told = context.Queue()
    processes = [context.Process(target=convert_slowly, args=(*a, told)) for a in arguments]
    for process in processes:
        process.start()
    try:
        return sorted(told.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def test_two_executables_in_one_folder_both_stay(tmp_path, source):
    saved, model = source
    cache = str(tmp_path / "new" / "cache")
    told = both((saved, tmp_path / "a", cache, 2), (saved, tmp_path / "b", cache, 3))
    assert told == ["", ""]
    names = sorted(os.listdir(cache))
    assert [name.partition(".")[2] for name in names] == ["ipu_exec", "json"] * 2
    for name in "ab":
        with load(tmp_path / name)["serving_default"] as signature:
            assert_like(signature, model, 5)


def test_one_output_folder_has_one_of_both_and_the_other_is_told(tmp_path, source):
    saved, model = source
    told = both((saved, tmp_path / "out", "cache", 2), (saved, tmp_path / "out", "cache", 3))
    assert told[0] == ""
    assert "is there and not empty" in told[1]
    assert "out" in told[1]
    with load(tmp_path / "out")["serving_default"] as signature:
        assert_like(signature, model, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


HOLD = """
import sys
from pathlib import Path
from ipu_dynamo.saved_model.files.locked_folder import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_folder_that_somebody_holds_is_waited_for_but_not_for_ever(tmp_path):
    folder = tmp_path / "deep" / "cache"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout.readline() == b"holds\n"
            wait = locked_folder(folder, seconds=0.1)
            with pytest.raises(TimeoutError, match=r"another process.*cache"), wait:
                pass
        finally:
            holder.kill()  # who is killed holds nothing
    with locked_folder(folder, seconds=5):
        pass


def test_a_folder_that_was_missing_goes_with_an_error(tmp_path):
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "deep" / "cache", tmp_path / "there"):
        with pytest.raises(KeyError), locked_folder(folder):
            raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_folder_is_made_again_if_whoever_held_it_removes_it(tmp_path, monkeypatch):
    folder, real, calls = tmp_path / "cache", os.open, []

    def opened(*arguments):
        handle = real(*arguments)
        if not calls:
            folder.rmdir()  # by another process, before this one holds it
        calls.append(handle)
        return handle

    monkeypatch.setattr(os, "open", opened)
    with locked_folder(folder):
        assert folder.is_dir()
        with pytest.raises(BlockingIOError):
            fcntl.flock(real(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert len(calls) == 2
