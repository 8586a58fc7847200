"""Read the engine's options: a user's, and those of the environment, which go first."""

import json
import os
from collections.abc import Mapping

from poptorch.errors import createPoptorchError
from poptorch.options.container import OptionsDict

ALLOW_OUT_OF_MEMORY = "debug.allowOutOfMemory"
_VARIABLE = "POPLAR_ENGINE_OPTIONS"


def engine_options(options: OptionsDict) -> dict[str, str]:
    """The engine's options in force: each one of the environment replaces the user's.

    Args:
        options: of an executor.

    Raises:
        poptorch.Error: the variable holds no JSON object.
    """
    own: Mapping[str, str] = options._Popart.options.get("engineOptions", {})
    return {**own, **options_of_environment()}


def switched_on(options: OptionsDict) -> set[str]:
    """The engine's options that are "true" in a compilation."""
    return {name for name, value in engine_options(options).items() if str(value).lower() == "true"}


def options_of_environment() -> dict[str, str]:
    """The options that POPLAR_ENGINE_OPTIONS sets.

    Raises:
        poptorch.Error: it holds no JSON object.
    """
    text = os.environ.get(_VARIABLE) or "{}"
    problem = ""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        found, problem = None, f": {error}"
    if not isinstance(found, dict):
        raise createPoptorchError(
            f"{_VARIABLE} must be a JSON object, got {text!r}{problem}", id="option"
        )
    return found
