"""Say where blocks of a model begin. Outside a compiled model all of this does nothing."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from ipu_dynamo import blocks
from ipu_dynamo.options.checks import check_ipu_id
from poptorch._logging import logger
from poptorch.errors import createPoptorchError, require, wrapped
from poptorch.tracing import current_trace

_Layer = TypeVar("_Layer", bound=Callable[..., Any])
BlockName = str | int | None


class Block(nn.Module):
    """A context: operators inside belong to the block, those after it need another one.

    Args:
        user_id: the block's name; None takes the next automatic id "0", "1", ...
        ipu_id: its IPU; None leaves that to the execution strategy.
    """

    def __init__(self, user_id: BlockName = None, ipu_id: int | None = None) -> None:
        super().__init__()
        _check(ipu_id)
        self._user_id, self._ipu_id = user_id, ipu_id

    @staticmethod
    def useAutoId() -> None:
        """Number blocks without a name from "0" again; call it first in `forward`."""
        if trace := current_trace():
            trace.restart_block_ids()

    @staticmethod
    def start(user_id: BlockName = None, ipu_id: int | None = None) -> None:
        """Begin a block that lasts until the next one begins.

        Args:
            user_id: as for `Block`.
            ipu_id: as for `Block`.
        """
        _check(ipu_id)
        _begin(user_id, ipu_id)

    def __enter__(self) -> Self:
        _begin(self._user_id, self._ipu_id)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.ops.ipu.end_block()


class LegacyBeginBlockFn(nn.Module):
    """A callable that begins a block and then calls another one.

    Args:
        layer_to_call: what is called.
        user_id: as for `BeginBlock`.
        ipu_id: as for `BeginBlock`.
    """

    def __init__(
        self,
        layer_to_call: Callable[..., Any],
        user_id: BlockName = None,
        ipu_id: int | None = None,
    ) -> None:
        super().__init__()
        _check(ipu_id)
        self._layer_to_call = layer_to_call
        self._user_id, self._ipu_id = user_id, ipu_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Begin the block, and return the result of the layer.

        Args:
            args: positional arguments of the layer.
            kwargs: keyword arguments of the layer.
        """
        self._user_id = _begin(self._user_id, self._ipu_id)
        return self._layer_to_call(*args, **kwargs)


def BeginBlock(
    layer_to_call: _Layer, user_id: BlockName = None, ipu_id: int | None = None
) -> _Layer | LegacyBeginBlockFn:
    """Begin a block whenever a layer is called; it lasts until another one begins.

    Args:
        layer_to_call: a module, or another callable.
        user_id: the block's name; None takes the next automatic id.
        ipu_id: its IPU; None leaves that to the execution strategy.

    Returns:
        a module itself, with a forward-pre-hook; for another callable, one that wraps it.

    Raises:
        poptorch.Error: the module begins a block already, or is neither a module nor callable;
            `ipu_id` is not the number of an IPU.
    """
    _check(ipu_id)
    if not isinstance(layer_to_call, nn.Module):
        if not callable(layer_to_call):
            raise createPoptorchError(
                f"BeginBlock takes a torch.nn.Module or a callable, got {layer_to_call!r}",
                id="block",
            )
        return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
    if blocks.begins_block(layer_to_call):
        raise createPoptorchError("module has already been assigned to a block.", id="block")
    if blocks.is_never_called(layer_to_call):  # PopTorch takes it, and begins no block
        problem = "BeginBlock has no effect on a %s, which has no forward: give it a layer"
        logger.warning(problem, type(layer_to_call).__name__)
        return layer_to_call
    return blocks.BeginBlock(layer_to_call, user_id, ipu_id)


def BlockFunction(
    user_id: BlockName = None, ipu_id: int | None = None
) -> Callable[[_Layer], _Layer]:
    """Decorate a function so that it runs inside a `Block`.

    Args:
        user_id: as for `Block`.
        ipu_id: as for `Block`.
    """
    _check(ipu_id)

    def decorate(function: _Layer) -> _Layer:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


def removeBlocks(module: nn.Module) -> None:
    """Remove the blocks that `BeginBlock`, of either package, added to a module.

    Args:
        module: it and its submodules lose their blocks.
    """
    require(isinstance(module, nn.Module), f"removeBlocks takes a torch.nn.Module, got {module!r}")
    blocks.remove_blocks(module)


def _check(ipu_id: Any) -> None:
    with wrapped():
        check_ipu_id(ipu_id)


def _begin(user_id: BlockName, ipu_id: int | None) -> BlockName:
    """Begin a block; return its id: in a trace of PopTorch's, one without a name has a number."""
    trace = current_trace()
    if trace is not None:
        user_id = str(user_id) if user_id else trace.next_block_id()
    blocks.begin(user_id, ipu_id)
    return user_id
