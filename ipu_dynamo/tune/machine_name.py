"""Name everything that decides how fast this machine multiplies matrices."""

import os
import platform
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

_MEANT = ("ATEN_CPU_", "DNNL_", "MKL_", "ONEDNN_")  # environment variables of the libraries


def machine_name() -> str:
    """Processor, versions of PyTorch and its libraries, and the user's settings for these."""
    settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_MEANT))
    return ", ".join([*_fixed(), *settings])


@cache
def _fixed() -> tuple[str, ...]:
    """The parts that do not change while a process runs."""
    return (
        _processor(),
        torch.backends.cpu.get_cpu_capability(),
        f"torch {torch.__version__}",
        f"built {sha256(torch.__config__.show().encode()).hexdigest()[:16]}",
    )


def _processor() -> str:
    """The processor's model, with family and stepping if the system has these."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return platform.processor() or platform.machine()
    first = file.read_text(encoding="utf-8").partition("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in lines}
    names = ("vendor_id", "model name", "cpu family", "model", "stepping", "CPU part")
    return " ".join(facts[name] for name in names if name in facts) or platform.machine()
