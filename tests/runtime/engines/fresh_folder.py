"""Give a test a folder for compiled code of its own, where only precompiled headers are shared."""

from pathlib import Path

from ipu_dynamo.tune.artifact_store import CACHE_DIR, open_store


def use_fresh_folder(folder: Path, monkeypatch) -> None:
    """Let stages be kept in an empty folder, with a link to the headers in the one of before."""
    if store := open_store():
        (folder / "headers").symlink_to(store.headers, target_is_directory=True)
    monkeypatch.setenv(CACHE_DIR, str(folder))
