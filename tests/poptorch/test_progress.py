"""Check that the bar of a compilation leaves nothing behind."""

import threading

from tqdm import tqdm

from poptorch.progress import compilation_bar


def test_a_bar_starts_no_thread(monkeypatch, capsys):
    monkeypatch.setattr(tqdm, "monitor", None)
    before = set(threading.enumerate())
    with compilation_bar(show=True):
        assert set(threading.enumerate()) == before
    assert "100%" in capsys.readouterr().err
