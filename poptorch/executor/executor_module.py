"""Stand for a module inside an executor's model, so that its parameters know the executor."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


class ExecutorModule:
    """Stands for a submodule of an executor's model: only its parameters come from the executor.

    Args:
        module: the submodule; it gets all accesses.
        present: returns the executor's object for a module or parameter inside.
    """

    __slots__ = ("_module", "_present")

    def __init__(self, module: nn.Module, present: Callable[[Any], Any]) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_present", present)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        return self._present(getattr(self._module, name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, plain_module(value))

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._present(self._module[key])

    def __iter__(self) -> Iterator[Any]:
        return map(self._present, iter(self._module))

    def __len__(self) -> int:
        return len(self._module)

    def __contains__(self, key: Any) -> bool:
        return plain_module(key) in self._module

    def __bool__(self) -> bool:
        return bool(self._module)

    def __eq__(self, other: object) -> bool:
        return self._module == plain_module(other)

    def __hash__(self) -> int:
        return hash(self._module)

    def __repr__(self) -> str:
        return repr(self._module)

    def __dir__(self) -> list[str]:
        return dir(self._module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy the module that this stands for."""
        return self._module.__reduce_ex__(protocol)


def plain_module(value: Any) -> Any:
    """The module that `value` stands for, or `value`."""
    return value._module if type(value) is ExecutorModule else value
