"""Check how many cores programs count on."""

import os

from ipu_dynamo.whole_step import worker_counts


def test_ranks_of_one_computer_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)}, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert worker_counts._cores() == 8
    for ranks, cores in (("2", 4), ("3", 2), ("16", 1), ("none", 8)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert worker_counts._cores() == cores
