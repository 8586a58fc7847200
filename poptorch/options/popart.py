"""Pass settings of the lower layers through, by their own names."""

import copy
from typing import Any, ClassVar, Self

from poptorch._logging import logger
from poptorch.errors import require
from poptorch.options.effects import Effect, has_effect, setter


class _PopartOptions:
    """Settings by key. Any key is taken here; a compilation refuses those that do not exist."""

    _PREFIX: ClassVar[str] = "_Popart."

    def __init__(self) -> None:
        self._is_frozen = False
        self.options: dict[str, Any] = {
            "instrumentWithHardwareCycleCounter": False,
            "rearrangeAnchorsOnHost": False,
        }

    @has_effect(Effect.RECORDED)
    def set(self, key: str, value: Any) -> Self:
        """Set one key; the table of options lists the effect of each.

        Args:
            key: name of the setting.
            value: of the type that the setting has.
        """
        self.store(key, value)
        if key == "logDir":
            logger.warning("_Popart logDir is ignored: use poptorch.Options.logDir()")
        return self

    @setter(Effect.MACHINE)
    def setEngineOptions(self, engine_options: dict[str, str]) -> None:
        """Set the options of the engine, all at once.

        Args:
            engine_options: texts by name of the option.
        """
        self.store("engineOptions", engine_options)

    @setter(Effect.RECORDED)
    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> None:
        """Switch rewriting patterns on or off by name, on top of a level's own choice.

        Args:
            patterns: whether each pattern is on, by its name.
            level: the choice of patterns that they change.
        """
        require(isinstance(level, int), f"level must be an int, got {level!r}")
        require(isinstance(patterns, dict), f"patterns must be a dict, got {patterns!r}")
        self.store("patterns_level", level)
        self.store("patterns", patterns)

    def store(self, key: str, value: Any) -> None:
        """Set one key without a word, for setters that stand for it.

        Args:
            key: name of the setting.
            value: of the type that the setting has.
        """
        self.checkIsFrozen()
        self.options[key] = value

    def merge(self, key: str, **values: str) -> None:
        """Add to the dictionary that is stored under a key.

        Args:
            key: name of the setting.
            values: entries of the dictionary, by key.
        """
        self.store(key, {**self.options.get(key, {}), **values})

    def checkIsFrozen(self) -> None:
        """Raise if nothing may change any more."""
        if self._is_frozen:
            raise AttributeError("Can't modify frozen Options: change a clone()")

    def _set_frozen(self, frozen: bool) -> None:
        self._is_frozen = frozen

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__class__()
        memo[id(self)] = twin
        twin.options = copy.deepcopy(self.options, memo)
        return twin

    def __repr__(self) -> str:
        values = (f"{key}={self.options[key]!r}" for key in sorted(self.options))
        return f"{type(self).__name__}({', '.join(values)})"
