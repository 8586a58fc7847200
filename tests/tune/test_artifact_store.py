"""Check that stored stages come back whole or not at all, and from the user's own folder only."""

import os
import stat
import threading
from pathlib import Path

import pytest

from ipu_dynamo import IpuError
from ipu_dynamo.tune import artifact_store as stage_store
from ipu_dynamo.tune.artifact_store import CACHE_DIR, StageArtifact, StageStore, open_store


@pytest.fixture
def store(tmp_path):
    return StageStore(tmp_path / "cache")


def entry(tmp_path, content=b"machine code", code=b"how to call it"):
    library = tmp_path / "made.so"
    library.write_bytes(content)
    return StageArtifact(code, {"source": (library, "kernel")})


def files(store):
    return [path for path in store.folder.rglob("*") if path.is_file()]


def test_an_entry_comes_back(store, tmp_path):
    store.write("key", entry(tmp_path))
    found = StageStore(store.folder).read("key")
    assert found.code == b"how to call it"
    library, name = found.kernels["source"]
    assert library.read_bytes() == b"machine code"
    assert library.parent.parent == store.folder
    assert name == "kernel"
    assert store.read("other") is None


def test_nobody_else_can_enter(store, tmp_path):
    store.write("key", entry(tmp_path))
    for path in [store.folder, *store.folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes().replace(b"c", b"x")),
    ],
    ids=["cut", "empty", "changed"],
)
def test_a_damaged_file_is_a_miss_and_can_be_replaced(store, tmp_path, caplog, damage, which):
    store.write("key", entry(tmp_path))
    damage(sorted(files(store))[which])
    assert store.read("key") is None
    assert "the stage is compiled again" in caplog.text
    store.write("key", entry(tmp_path))
    library, _ = store.read("key").kernels["source"]
    assert library.read_bytes() == b"machine code"


def test_a_lost_library_is_a_miss(store, tmp_path):
    store.write("key", entry(tmp_path))
    (library,) = (store.folder / "kernels").iterdir()
    library.unlink()
    assert store.read("key") is None


def test_a_failed_write_leaves_what_was_there(store, tmp_path, monkeypatch):
    store.write("key", entry(tmp_path))
    before = files(store)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        store.write("key", entry(tmp_path, code=b"other"))
    monkeypatch.undo()
    assert files(store) == before
    assert store.read("key").code == b"how to call it"


def test_readers_see_whole_entries_while_others_write(store, tmp_path):
    """Damaged entries would come back as None."""
    entries = [entry(tmp_path, code=bytes([i]) * 100_000) for i in range(2)]
    store.write("key", entries[0])
    stop = threading.Event()

    def rewrite(mine):
        while not stop.is_set():
            store.write("key", mine)

    writers = [threading.Thread(target=rewrite, args=(mine,)) for mine in entries]
    for writer in writers:
        writer.start()
    try:
        seen = {store.read("key").code for _ in range(300)}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert seen <= {mine.code for mine in entries}


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    owner = os.geteuid()
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(IpuError, match=f"belongs to user {owner}\n  try:  set {CACHE_DIR}"):
        open_store()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_write_to_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o770)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    with pytest.raises(IpuError, match=r"others can write to \(mode 0770, it should be 0700\)"):
        open_store()


@pytest.mark.parametrize("inner", ["stages", "kernels", "inductor", "building"])
def test_an_inner_folder_that_others_write_to_is_refused(tmp_path, monkeypatch, inner):
    tmp_path.chmod(0o700)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    (tmp_path / inner).mkdir()
    (tmp_path / inner).chmod(0o777)
    with pytest.raises(IpuError, match=rf"{inner}, which others can write to \(mode 0777"):
        open_store()


def test_a_bad_default_folder_is_warned_of_once_and_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv(CACHE_DIR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ipu_dynamo").mkdir()
    (tmp_path / "ipu_dynamo").chmod(0o777)
    assert open_store() is open_store() is None
    assert len(caplog.records) == 1
    assert "others can write to" in caplog.text


def test_a_folder_that_cannot_be_made_is_refused_when_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "file"))
    with pytest.raises(IpuError, match="compiled stages cannot be kept"):
        open_store()


def test_environment_names_the_folder_or_switches_it_off(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "named"))
    assert open_store().folder == tmp_path / "named"
    monkeypatch.setenv(CACHE_DIR, "off")
    assert open_store() is None
    monkeypatch.delenv(CACHE_DIR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_store().folder == tmp_path / "ipu_dynamo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert open_store().folder == tmp_path / ".cache" / "ipu_dynamo"


@pytest.fixture(autouse=True)
def warn_again():
    stage_store._warn_once.cache_clear()
    yield
    stage_store._warn_once.cache_clear()
