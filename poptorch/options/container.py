"""Keep declared options by name, and refuse every change once frozen."""

import copy
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from poptorch.errors import require


class OptionsDict:
    """A dictionary of declared options, read and written as attributes.

    Invariant: while frozen, neither a value nor a private attribute changes through this class.

    Args:
        declared: the options and their defaults.
    """

    _PREFIX: ClassVar[str] = ""
    _values: dict[str, Any]
    _is_frozen: bool

    def __init__(self, **declared: Any) -> None:
        self._declare_private(_values=declared, _is_frozen=False)

    def _declare_private(self, **attributes: Any) -> None:
        """Add attributes that are no options: not printed, not part of `toDict`."""
        self.__dict__.update(attributes)

    # values

    def set(self, **values: Any) -> None:
        """Change declared options; each new value has the type of the old one.

        Args:
            values: by name of the option.
        """
        self.checkIsFrozen()
        for name, value in values.items():
            require(name in self._values, f"Invalid option {name}{self._near(name)}")
            wanted = type(self._values[name])
            require(
                isinstance(value, wanted),
                f"Unexpected type {type(value).__name__} for option {name}: "
                f"expected {wanted.__name__}",
            )
            self._values[name] = value

    def createOrSet(self, **values: Any) -> None:
        """Declare options, or change them as `set` does where they exist.

        Args:
            values: by name of the option.
        """
        self.checkIsFrozen()
        for name, value in values.items():
            if name in self._values:
                self.set(**{name: value})
            else:
                self._values[name] = value

    def exists(self, option: str) -> bool:
        """Whether an option is declared.

        Args:
            option: its name.
        """
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        """Forget an option.

        Args:
            option: its name; another name has no effect.
        """
        self.checkIsFrozen()
        self._values.pop(option, None)

    def toDict(self) -> dict[str, Any]:
        """A copy of the values by name."""
        return dict(self._values)

    def update(self, other: dict[str, Any]) -> dict[str, Any]:
        """`other` and the values of this object in one new dictionary; no name may be in both.

        Args:
            other: values by name; it stays as it is.
        """
        twice = sorted(self._values.keys() & other.keys())
        require(not twice, f"Options set in two places: {', '.join(twice)}")
        return {**other, **self._values}

    def __call__(self, option: str) -> Any:
        """Return the value of an option.

        Args:
            option: its name.
        """
        if option in self._values:  # also where a setter has the same name
            return self._values[option]
        return getattr(self, option)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._values:
            return self._values[name]
        setters = [method for method in dir(type(self)) if not method.startswith("_")]
        raise AttributeError(f"Invalid attribute {name}.{self._near(name, setters)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # so that a subclass can take over an existing object
            object.__setattr__(self, name, value)
            return
        self.checkIsFrozen()
        if not name.startswith("_"):
            self.set(**{name: value})
        elif name in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(f"Invalid private attribute {name}")

    # freezing and copying

    def checkIsFrozen(self) -> None:
        """Raise if nothing may change any more."""
        if self._is_frozen:
            raise AttributeError(
                "Can't modify frozen Options: they are in use by an executor or a data loader; "
                "change a clone(), or set them before"
            )

    def _freeze(self) -> None:
        self._set_frozen(True)

    def _unfreeze(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        """Freeze or unfreeze this object and those it is made of."""
        self.__dict__["_is_frozen"] = frozen
        for part in self._parts().values():
            part._set_frozen(frozen)

    def _parts(self) -> dict[str, Any]:
        """The objects that this one is made of, by property name."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An independent copy that is not frozen."""
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.__dict__["_is_frozen"] = False
        return twin

    def __repr__(self) -> str:
        values = [f"{name}={self._values[name]!r}" for name in sorted(self._values)]
        parts = [f"{name}={part!r}" for name, part in self._parts().items()]
        return f"{type(self).__name__}({', '.join(values + parts)})"

    def _near(self, name: str, others: Iterable[str] = ()) -> str:
        """A hint at declared names, or others, that look like `name`."""
        near = get_close_matches(name, [*others, *self.__dict__.get("_values", ())], n=3)
        parts = self._parts() if "_values" in self.__dict__ else {}
        near = [f"{part}.{name}" for part, of in parts.items() if hasattr(type(of), name)] or near
        return f" (did you mean {', '.join(near)}?)" if near else ""
