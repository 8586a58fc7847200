"""Remember which attributes of an optimizer may change after compilation."""

from collections.abc import Iterable
from typing import Self

from poptorch.errors import require


class VariableAttributes:
    """The attributes that `setOptimizer` may change without compiling again.

    Args:
        variable_attributes: those, at first.
        allowed_attributes: all that exist.
    """

    def __init__(
        self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]
    ) -> None:
        self._allowed_attributes = frozenset(allowed_attributes)  # programs read it, too
        self._variable = set(variable_attributes)

    def isConstant(self, attr: str) -> bool:
        """Whether an attribute is compiled into the program.

        Args:
            attr: name of the attribute.
        """
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Compile an attribute into the program.

        Args:
            attr: name of the attribute.
        """
        self._check(attr)
        self._variable.discard(attr)

    def markAsVariable(self, attr: str) -> None:
        """Let an attribute change after compilation.

        Args:
            attr: name of the attribute.
        """
        self._check(attr)
        self._variable.add(attr)

    def copy(self) -> Self:
        """An independent copy."""
        return self.__class__(self._variable, self._allowed_attributes)

    def _check(self, attr: str) -> None:
        known = ", ".join(sorted(self._allowed_attributes))
        require(
            attr in self._allowed_attributes, f"Unknown attribute {attr!r}: choose one of {known}"
        )

    def __repr__(self) -> str:
        return f"VariableAttributes({sorted(self._variable)}, {sorted(self._allowed_attributes)})"
