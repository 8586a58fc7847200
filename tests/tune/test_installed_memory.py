"""Check that limits of control groups count as memory."""

import os

import pytest
import torch

from ipu_dynamo.tune.installed_memory import cgroup_limits, installed_bytes


@pytest.fixture
def groups(tmp_path):
    """Control groups of both versions; the process is in `/a/b`."""
    for folder, name, text in (
        (".", "memory.max", "max\n"),
        ("a", "memory.max", "5000\n"),
        ("a/b", "memory.max", "7000\n"),
        ("memory/a/b", "memory.limit_in_bytes", "6000\n"),
        ("cpu/a/b", "memory.limit_in_bytes", "1\n"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("own", "limits"),
    [
        ("0::/a/b\n", [7000, 5000]),
        ("3:cpu:/a/b\n5:memory:/a/b\n", [6000]),
        ("0::/\n", []),
        ("0::/of/the/host\n", []),
    ],
)
def test_all_limits_around_the_process_count(groups, own, limits):
    (groups / "own").write_text(own)
    assert cgroup_limits(groups, groups / "own") == limits


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cgroup_limits(tmp_path, tmp_path / "none") == []


def test_memory_is_that_of_the_computer_at_most():
    installed = installed_bytes(torch.device("cpu"))
    assert 0 < installed <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert installed_bytes(torch.device("meta")) is None
