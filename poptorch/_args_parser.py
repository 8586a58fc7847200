"""Offer what old programs import from `poptorch._args_parser`."""

from collections.abc import Callable
from typing import Any

from poptorch.arguments import CallArguments, bind, parameters_of


class ArgsParser:
    """Bind arguments to the parameters of a model's forward.

    Args:
        model: a module or a function.
    """

    def __init__(self, model: Callable[..., Any], *_: Any, **__: Any) -> None:
        self._parameters = parameters_of(model)

    def __call__(self, args: Any, kwargs: Any, *_: Any, **__: Any) -> CallArguments:
        """The arguments of a call, by parameter."""
        return bind(self._parameters, args, kwargs)
