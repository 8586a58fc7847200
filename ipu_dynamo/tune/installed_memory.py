"""Find how much memory a device has, whatever of it is free: the same in every run."""

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def installed_bytes(device: torch.device) -> int | None:
    """Bytes of a device's memory, of which this process may have all; None: not known.

    For the CPU that is the computer's memory, or the limit of the process's cgroup if it is less.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return None
    installed = _of_computer()
    limits = cgroup_limits()
    return None if installed is None else min(installed, *limits) if limits else installed


def _of_computer() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not available on Windows
        return None


def cgroup_limits(root: Path = _CGROUPS, own: Path = _OWN) -> list[int]:
    """Limits in bytes of the cgroup of this process and of those around it, of versions 1 and 2.

    Args:
        root: where the cgroups are mounted.
        own: the file with the paths of the process's cgroups, `0::/a/b` or `5:memory:/a/b`.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / controllers, "memory.limit_in_bytes"
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for part in (inner, *inner.parents):  # in a container the path may be the host's
            with suppress(OSError, ValueError):  # `max` is no limit
                limits.append(int((folder / part / name).read_text()))
    return limits
