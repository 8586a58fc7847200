"""Bind a call's arguments to a model's parameters, and hold later calls to the first one."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from poptorch._logging import logger
from poptorch.arg_parsers import custom_parser, rebuilt
from poptorch.errors import createPoptorchError, require

_AGAIN = "Create a new wrapper of the model, or call destroy() on this one, to compile it again."
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call, by parameter.

    Args:
        values: arguments by name; tuples under "*name", dictionaries under "**name".
        positional: how many there are by position, defaults included.
        names: the parameters that can be given by position, in order.
    """

    values: Mapping[str, Any]
    positional: int
    names: tuple[str, ...]

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Every tensor and other Python value, with a name such as `t[0]`."""
        for name, value in self.values.items():
            yield from _leaves(value, name)

    def rebuild(self, tensors: Iterable[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, with `tensors` in the places of the tensor leaves."""
        given = iter(tensors)
        leaves = (next(given) if isinstance(x, Tensor) else x for _, x in self.leaves())
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, value in self.values.items():
            new = rebuilt(value, leaves)
            if name.startswith("**"):
                kwargs |= new
            elif name.startswith("*"):
                args += new
            elif name in self.names:
                args.append(new)
            else:
                kwargs[name] = new
        return args, kwargs


Parameters = Mapping[str, inspect.Parameter]


def parameters_of(model: Callable[..., Any]) -> Parameters:
    """The parameters of a model's forward, by name."""
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some builtins do not tell
        return inspect.signature(_any_arguments).parameters


def _any_arguments(*args: Any, **kwargs: Any) -> None: ...


def bind(parameters: Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallArguments:
    """Give each argument to the parameter that takes it, and the others their defaults.

    Raises:
        AssertionError: too many arguments, an unknown name, or a parameter given twice.
        poptorch.Error: a parameter without a default gets nothing.
    """
    rest, named = list(args), dict(kwargs)
    values: dict[str, Any] = {}
    positional = 0
    by_position = [p.name for p in parameters.values() if p.kind in _POSITIONAL]
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            values[f"*{name}"] = tuple(rest)
            positional += len(rest)
            rest = []
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            values[f"**{name}"] = named
            named = {}
        else:
            positional += parameter.kind in _POSITIONAL
            if rest and parameter.kind in _POSITIONAL:
                if name in named:
                    raise AssertionError(f"The parameter {name} is passed more than once")
                values[name] = rest.pop(0)
            elif name in named:
                values[name] = named.pop(name)
            elif parameter.default is not inspect.Parameter.empty:
                values[name] = parameter.default
            else:
                raise createPoptorchError(f"Mandatory parameter {name} missing", id="input")
    if rest:
        known = ", ".join(parameters)
        raise AssertionError(f"Too many arguments provided: {len(args)} for {known}")
    if named:
        known = ", ".join(parameters)
        raise AssertionError(f"Unknown arguments: {', '.join(named)} (known: {known})")
    return CallArguments(values, positional, tuple(by_position))


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class _Value:
    value: Any


@dataclass(frozen=True, slots=True)
class _Container:
    """A list, tuple, dictionary or object of a registered class: its type, and its contents."""

    type: type
    children: tuple[tuple[Any, "_Expected"], ...]


_Expected = _Tensor | _Value | _Container


class ExpectedCall:
    """The required structure of the arguments of every call, taken from the first call."""

    def __init__(self, call: CallArguments) -> None:
        self._positional = call.positional
        self._arguments = {name: _expected(value) for name, value in call.values.items()}

    def tensors(self, call: CallArguments) -> list[Tensor]:
        """The tensors of a later call, in the order of the first one's leaves.

        Raises:
            poptorch.Error: for any difference from the first call but the tensors' values.
        """
        if call.positional != self._positional:
            raise _mismatch(
                f"Number of positional arguments mismatch: expected {self._positional} arguments "
                f"but got {call.positional}"
            )
        found: list[Tensor] = []
        for name, expected in self._arguments.items():
            _match(expected, call.values[name], name, found)
        return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = _children(value)
    if children is None:
        yield name, value
        return
    for key, child in children:
        yield from _leaves(child, _path(name, value, key))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """The entries of a container, with their keys or positions; None if it is no container."""
    parser = custom_parser(type(value))
    if parser is not None:
        return list(enumerate(parser.yieldTensors(value)))
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else None


def _path(name: str, container: Any, key: Any) -> str:
    if name.startswith("**") and "[" not in name:
        return str(key)
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return f"{name}.{container._fields[key]}"
    return f"{name}[{key!r}]"


def _expected(value: Any) -> _Expected:
    if isinstance(value, Tensor):
        return _Tensor(value.dtype, value.shape)
    children = _children(value)
    if children is None:
        return _Value(value)
    return _Container(type(value), tuple((key, _expected(child)) for key, child in children))


def _match(expected: _Expected, value: Any, name: str, found: list[Tensor]) -> None:
    """Append the tensors of `value` to `found`, or raise for a difference."""
    match expected:
        case _Tensor():
            if not isinstance(value, Tensor):
                raise _wrong_type(name, Tensor, value)
            if value.dtype != expected.dtype:
                raise _mismatch(
                    f"Data type mismatch for {name}: expected {expected.dtype} but got "
                    f"{value.dtype}"
                )
            if value.shape != expected.shape:
                raise _mismatch(
                    f"Shape mismatch for {name}: expected {expected.shape} but got {value.shape}. "
                    "A smaller last batch can be left out with drop_last=True"
                )
            found.append(value)
        case _Value(value=known):
            if type(value) is not type(known):
                raise _wrong_type(name, type(known), value)
            if not _equal(known, value):
                raise _mismatch(f"Value mismatch for {name}: expected {known!r} but got {value!r}")
        case _Container():
            _match_container(expected, value, name, found)


def _match_container(expected: _Container, value: Any, name: str, found: list[Tensor]) -> None:
    if type(value) is not expected.type:
        raise _wrong_type(name, expected.type, value)
    children = dict(_children(value) or ())
    if isinstance(value, dict):
        known = dict(expected.children)
        problems = [
            f"{what} arguments: {', '.join(map(str, keys))}."
            for what, keys in (
                ("Unexpected", [key for key in children if key not in known]),
                ("Missing", [key for key in known if key not in children]),
            )
            if keys
        ]
        if problems:
            raise _mismatch(f"Keys mismatch for {name}: {' '.join(problems)}")
    elif len(children) != len(expected.children):
        raise _mismatch(
            f"Length mismatch for {name}: expected {len(expected.children)} but got {len(children)}"
        )
    for key, child in expected.children:
        _match(child, children[key], _path(name, value, key), found)


def _equal(known: Any, value: Any) -> bool:
    """Whether a Python value is the one that was compiled in; arrays count by identity."""
    if known is value:
        return True
    result = known == value
    return bool(result) if getattr(result, "shape", ()) == () else False


def _wrong_type(name: str, expected: type, value: Any) -> Exception:
    return _mismatch(f"Type mismatch for {name}: expected {expected} but got {type(value)}")


def _mismatch(problem: str) -> Exception:
    return createPoptorchError(f"{problem}. {_AGAIN}", id="input")


def check_batches(call: CallArguments, *, splits: int, factors: str) -> None:
    """Check that every tensor of a call divides into micro-batches.

    Args:
        splits: micro-batches of each input.
        factors: the product that makes `splits`, for the error.

    Raises:
        poptorch.Error: a tensor without elements.
        AssertionError: rows that do not divide.
    """
    for name, value in call.leaves():
        if not isinstance(value, Tensor):
            continue
        if 0 in value.shape:
            shape = list(value.shape)
            raise createPoptorchError(
                f"Zero-sized tensors are unsupported (Got shape {shape})", id="input"
            )
        rows = value.shape[0] if value.dim() else 1
        require(
            rows % splits == 0,
            f"Invalid batch dimension: In the input {name} {value.shape}, the batch dimension "
            f"({rows}) must be a multiple of {factors} = {splits} because it is used to calculate "
            "the batch size which will be executed on the device in any given iteration. For a "
            "full explanation see the batching semantics page of the documentation.",
        )


def warn_about_dictionaries(call: CallArguments) -> None:
    """Say that dictionaries as arguments are not common ground for all versions of PopTorch."""
    if any(isinstance(v, dict) and not n.startswith("**") for n, v in call.values.items()):
        logger.warning("Dictionaries as arguments are only partially supported by PopTorch")
