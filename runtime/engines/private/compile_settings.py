"""Take PyTorch's settings that Inductor compiles by from one process to another.

Checked on PyTorch 2.13.0.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch._functorch.config
import torch._inductor.config


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The settings of a process; those of Inductor and functorch by name."""

    inductor: dict[str, Any]
    functorch: dict[str, Any]
    threads: int
    precision: str
    deterministic: bool
    warn_only: bool
    mkldnn: bool
    dtype: torch.dtype

    @classmethod
    def in_force(cls) -> Self:
        """Those of this thread now."""
        return cls(
            torch._inductor.config.save_config_portable(),
            torch._functorch.config.save_config_portable(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            *_deterministic(),
            torch._C._get_mkldnn_enabled(),
            torch.get_default_dtype(),
        )

    def apply(self) -> None:
        """Put them in force in this process, in which nothing else compiles meanwhile.

        It compiles with one process: it is one of several itself.
        """
        import torch._inductor.inductor_prims  # registers operators, and takes a second

        _load(torch._inductor.config, self.inductor)
        torch._inductor.config.compile_threads = 1
        _load(torch._functorch.config, self.functorch)
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.precision)
        deterministic = self.deterministic, self.warn_only
        if deterministic != _deterministic():
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch._C._set_mkldnn_enabled(self.mkldnn)
        torch.set_default_dtype(self.dtype)


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _load(config: Any, values: dict[str, Any]) -> None:
    """Set what differs: saved code has the names of settings that were ever set."""
    now = config.save_config_portable()
    config.load_config({name: of for name, of in values.items() if now.get(name) != of})


def settings_of(
    function: tuple[tuple[str, bool | int], ...],
) -> AbstractContextManager[None]:
    """Let Inductor's settings for a function hold in a block."""
    patched: AbstractContextManager[None] = torch._inductor.config.patch(dict(function))
    return patched


def most_processes() -> int:
    """The number of processes that Inductor may compile with; 1 turns all others off."""
    return torch._inductor.config.compile_threads or 1
