"""Show modules together with the blocks that they begin."""

import builtins
from typing import Any

from torch import nn


def module_repr(m: nn.Module) -> str:
    """Return the text of a module, with each block before the submodule that begins it.

    Args:
        m: the module.
    """
    lines = []
    if extra := m.extra_repr():
        lines += extra.split("\n")
    simple = bool(lines) and not m._modules
    for name, child in m._modules.items():
        if child is not None:
            text = module_repr(child).replace("\n", "\n  ")
            lines.append(f"({name}): {text}")
    before = "".join(f"{hook!r} " for hook in m._forward_pre_hooks.values())
    head = f"{before}{m._get_name()}("
    if not lines:
        return f"{head})"
    if simple and len(lines) == 1:
        return f"{head}{lines[0]})"
    return "\n  ".join([head, *lines]) + "\n)"


def print(m: Any) -> None:
    """Print an object; a module with its blocks, as `module_repr` writes it.

    Args:
        m: a module or any other object.
    """
    if isinstance(m, nn.Module):
        builtins.print(module_repr(m))
    builtins.print(m)
