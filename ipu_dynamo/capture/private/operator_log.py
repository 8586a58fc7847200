"""Note what operators are called for each of several owners, without computing anything.

Every use of PyTorch's private names that this takes. Checked on PyTorch 2.13.0.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_FEW = 16  # elements of a tensor that is known by its values


class NotSeparableError(Exception):
    """An operator takes tensors of several owners, draws random numbers, or reads one of none."""


class OperatorLog(TorchDispatchMode):
    """While entered, notes the operators of each owner of tensors.

    A value that depends on no owner's tensors is described in the line of the owner that reads it.

    Args:
        owned: tensors, each with its owner and its name there.

    Attributes:
        lines: of each owner, its operators in order, with their arguments.
    """

    def __init__(self, owned: list[tuple[Tensor, int, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: dict[int, list[str]] = {owner: [] for _, owner, _ in owned}
        self._known: dict[int, tuple[int | None, str]] = {
            id(tensor): (owner, name) for tensor, owner, name in owned
        }
        self._alive: list[Tensor] = [tensor for tensor, _, _ in owned]

    def described(self, value: Any) -> str:
        """Describe a value: a tensor by the operators that made it, others by their `repr`."""
        if isinstance(value, Tensor):
            return self._of(value)[1]
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.described, value))}]"
        if isinstance(value, Mapping):
            return str({key: self.described(own) for key, own in value.items()})
        return f"{type(value).__name__} {value!r}"

    def owner(self, tensor: Tensor) -> int | None:
        """Whose a tensor is."""
        return self._of(tensor)[0]

    def _of(self, tensor: Tensor) -> tuple[int | None, str]:
        known = self._known.get(id(tensor))
        if known is None:
            if tensor.device.type == "meta" or tensor.numel() > _FEW:
                raise NotSeparableError("a tensor from outside")
            known = None, f"{tensor.dtype} {tensor.tolist()}"
            self._note(tensor, *known)
        return known

    def _note(self, tensor: Tensor, owner: int | None, name: str) -> None:
        self._known[id(tensor)] = owner, name
        self._alive.append(tensor)  # its identity is not another one's later

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotSeparableError("random numbers")
        taken = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        owners = {self.owner(tensor) for tensor in taken} - {None}
        if len(owners) > 1:
            raise NotSeparableError("tensors of several owners")
        line = f"{func} {self.described(args)} {self.described(kwargs)}"
        result = func(*args, **kwargs)
        owner = next(iter(owners), None)
        if owner is not None:
            number = len(self.lines[owner])
            self.lines[owner].append(line)
            line = f"%{number}"
        for place, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self._note(leaf, owner, f"{line}.{place}")
        return result
