"""Let libraries put other functions in the place of some while a model is traced."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol


class Substitution(Protocol):
    """An object that replaces functions; libraries register its class."""

    def replace(self) -> None:
        """Put other functions in their places."""

    def restore(self) -> None:
        """Put the first ones back."""


_kinds: list[type[Substitution]] = []


class _OverwriteContextManager:
    """The object with which PopTorch's libraries register."""

    @staticmethod
    def registerSubsitutionManager(substitution_manager: type[Substitution]) -> None:
        """Use a new object of this class in every compilation. A class is registered once."""
        if substitution_manager not in _kinds:
            _kinds.append(substitution_manager)


@contextmanager
def substitutions() -> Iterator[None]:
    """Replace what registered classes replace, and restore it in reverse order."""
    with ExitStack() as stack:
        for kind in _kinds:
            substitution = kind()
            substitution.replace()
            stack.callback(substitution.restore)
        yield
