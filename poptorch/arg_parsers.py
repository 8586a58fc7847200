"""Take structures of tensors apart and put them together, classes of the user's included."""

import importlib
import importlib.util
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from poptorch._logging import logger
from poptorch.errors import createPoptorchError


class ICustomArgParser(ABC):
    """How objects of one class are taken apart and put together."""

    @abstractmethod
    def yieldTensors(self, struct: Any) -> Iterator[Tensor]:
        """Yield the tensors of an object, always in the same order.

        Args:
            struct: an object of the class.
        """

    @abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[Tensor]) -> Any:
        """Return an object like another one, with other tensors.

        Args:
            original_structure: an object of the class.
            tensor_iterator: has the tensors, in the order of `yieldTensors`. The method takes as
                many as `yieldTensors` gives, since others may follow.
        """


_parsers: dict[type, ICustomArgParser] = {}


def registerCustomArgParser(arg_data_type: type, arg_parser: ICustomArgParser | None) -> None:
    """Let objects of a class be arguments and results of models.

    Args:
        arg_data_type: the class; objects of subclasses are treated alike.
        arg_parser: None forgets the class.
    """
    if arg_parser is None:
        _parsers.pop(arg_data_type, None)
    elif isinstance(arg_parser, ICustomArgParser):
        _parsers[arg_data_type] = arg_parser
    else:
        raise createPoptorchError(
            f"the parser of {arg_data_type.__name__} must be an object of a class derived from "
            f"poptorch.ICustomArgParser, got {arg_parser!r}",
            id="input",
        )


def registerGeometricCustomArgParsers() -> None:
    """Let batches of graphs be arguments, where the package `poptorch_geometric` is installed."""
    try:
        if importlib.util.find_spec("poptorch_geometric") is not None:
            importlib.import_module("poptorch_geometric.types").registerCustomArgParsers()
    except ImportError as error:  # also while poptorch_geometric itself imports this package
        logger.debug("poptorch_geometric has registered no parsers: %s", error)


def custom_parser(data_type: type) -> ICustomArgParser | None:
    """The parser of a class: its own, or that of the base class that was registered first."""
    if data_type in _parsers:
        return _parsers[data_type]
    for known, parser in _parsers.items():
        if issubclass(data_type, known):
            return parser
    return None


def picklable_parsers() -> dict[type, ICustomArgParser]:
    """The parsers that another process can get, by class."""
    return {known: parser for known, parser in _parsers.items() if _picklable((known, parser))}


def _picklable(thing: object) -> bool:
    try:
        pickle.dumps(thing)
    except Exception:  # a class of the user may raise any error
        return False
    return True


def tensors_of(struct: Any) -> Iterator[Any]:
    """The leaves of `struct` in order: tensors, and all other objects that are no containers."""
    parser = custom_parser(type(struct))
    if parser is not None:
        yield from parser.yieldTensors(struct)
    elif isinstance(struct, dict):
        for value in struct.values():
            yield from tensors_of(value)
    elif isinstance(struct, list | tuple):
        for value in struct:
            yield from tensors_of(value)
    else:
        yield struct


def rebuilt(struct: Any, leaves: Iterator[Any]) -> Any:
    """A structure like `struct` with the next leaves, in the order of `tensors_of`."""
    parser = custom_parser(type(struct))
    if parser is not None:
        return parser.reconstruct(struct, leaves)
    if isinstance(struct, dict):
        values = {key: rebuilt(value, leaves) for key, value in struct.items()}
        return values if type(struct) is dict else type(struct)(values)
    if isinstance(struct, tuple) and hasattr(struct, "_fields"):  # a named tuple
        return type(struct)(*(rebuilt(value, leaves) for value in struct))
    if isinstance(struct, list | tuple):
        return type(struct)(rebuilt(value, leaves) for value in struct)
    return next(leaves)
