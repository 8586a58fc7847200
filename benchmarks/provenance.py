"""Say where figures come from: the commit, the versions and the machine."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import ROOT


def provenance() -> dict[str, Any]:
    """Describe this run, as a dictionary that JSON can hold."""
    return {
        **state_of_checkout(ROOT),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write figures into a file, with where they come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(provenance() | figures, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def state_of_checkout(root: Path) -> dict[str, Any]:
    """The commit of a checkout, and whether its work tree differs from it."""
    return {
        "commit": _git(root, "rev-parse", "HEAD"),
        "modified": bool(_git(root, "status", "--porcelain")),
    }


def _git(root: Path, *arguments: str) -> str | None:
    """Ask git about a checkout; None where there is no git, or no commit."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def _cpu() -> str:
    """Name the processor, as Linux calls it where it can."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
