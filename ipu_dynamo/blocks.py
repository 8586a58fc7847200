"""Let users say where blocks of a model begin, so that blocks become stages on IPUs.

All forms put marker operators into the traced graph; run eagerly, outside a compiled model, they
do nothing. The placement pass reads the markers.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType, TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from ipu_dynamo.errors import IpuError
from ipu_dynamo.ops.marks.markers import NO_IPU
from ipu_dynamo.options.checks import check_ipu_id

_Module = TypeVar("_Module", bound=nn.Module)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_anonymous = itertools.count()
_numbering: ContextVar[Callable[[], str] | None] = ContextVar("ipu_block_numbering", default=None)


@contextmanager
def numbering(next_id: Callable[[], str]) -> Iterator[None]:
    """Let `next_id` name the layers that begin a block without a name, while a model is traced."""
    token = _numbering.set(next_id)
    try:
        yield
    finally:
        _numbering.reset(token)


def begin(user_id: str | int | None = None, ipu_id: int | None = None) -> None:
    """Begin a block: later operators of the model belong to it.

    Args:
        user_id: the block's name; None takes the next number, from "0".
        ipu_id: its IPU; None leaves that to the strategy.
    """
    torch.ops.ipu.begin_block(str(user_id) if user_id else "", NO_IPU if ipu_id is None else ipu_id)


class Block:
    """A context: operators inside belong to the block, operators after it need another one.

    Args:
        user_id: the block's name; None takes the next number, from "0".
        ipu_id: its IPU; None leaves that to the strategy.
    """

    def __init__(self, user_id: str | int | None = None, ipu_id: int | None = None) -> None:
        check_ipu_id(ipu_id)
        self.user_id, self.ipu_id = user_id, ipu_id

    def __enter__(self) -> "Block":
        begin(self.user_id, self.ipu_id)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.ops.ipu.end_block()


def BlockFunction(  # noqa: N802 (PopTorch's name)
    user_id: str | int | None = None, ipu_id: int | None = None
) -> Callable[[_Function], _Function]:
    """Decorate a function so that it runs inside `Block(user_id, ipu_id)`.

    Args:
        user_id: as for `Block`.
        ipu_id: as for `Block`.
    """
    check_ipu_id(ipu_id)

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


class BlockStart:
    """The forward-pre-hook of every `BeginBlock`: begins a block each time its module is called.

    A block without a name keeps the first that it gets from `numbering`.
    """

    def __init__(self, user_id: str | int | None, ipu_id: int | None) -> None:
        self.user_id, self.ipu_id = user_id, ipu_id
        # One module keeps one number, however often it is called.
        self._own_name = f"#{next(_anonymous)}"

    @property
    def name(self) -> str:
        """The name of its blocks in the graph."""
        return str(self.user_id) if self.user_id else self._own_name

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # Dynamo's graphs hold no names of a trace, and it cannot read the variable.
        if not self.user_id and not torch.compiler.is_dynamo_compiling():
            next_id = _numbering.get()
            self.user_id = next_id() if next_id else self.user_id
        begin(self.name, self.ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self.user_id}, ipu_id={self.ipu_id})"


def BeginBlock(  # noqa: N802 (PopTorch's name)
    layer: _Module, user_id: str | int | None = None, ipu_id: int | None = None
) -> _Module:
    """Begin a block whenever `layer` is called; it lasts until another one begins.

    Args:
        layer: a module.
        user_id: as for `Block`.
        ipu_id: as for `Block`.

    Returns:
        `layer` itself, with a forward-pre-hook.

    Raises:
        IpuError: `layer` begins a block already, is no module, or is a list of modules, which
            nothing calls.
        OptionError: `ipu_id` is not the number of an IPU.
    """
    check_ipu_id(ipu_id)
    if not isinstance(layer, nn.Module):
        of = f" {layer!r}" if isinstance(layer, str) else ""
        raise IpuError(
            f"BeginBlock takes a torch.nn.Module, not the {type(layer).__name__}{of}\n"
            '  try:  the module itself, BlockFunction("name") for a function, or '
            '`with Block("name"):` for operators',
            id="block",
        )
    if is_never_called(layer):
        raise IpuError(
            f"BeginBlock takes a module that is called, and a {type(layer).__name__} has no "
            "forward\n"
            "  try:  begin the block at the first of its layers: BeginBlock(layers[0], ipu_id=...)",
            id="block",
        )
    if begins_block(layer):
        raise IpuError("module has already been assigned to a block.")
    layer.register_forward_pre_hook(BlockStart(user_id, ipu_id))
    return layer


def is_never_called(layer: nn.Module) -> bool:
    """Whether `layer` is a container without a forward, as `nn.ModuleList` is."""
    return layer.forward == MethodType(nn.Module.forward, layer)


def begins_block(layer: nn.Module) -> bool:
    """Whether `layer` itself begins a block."""
    return any(isinstance(hook, BlockStart) for hook in layer._forward_pre_hooks.values())


def remove_blocks(module: nn.Module) -> None:
    """Remove what `BeginBlock` added to `module` and its submodules."""
    for layer in module.modules():
        for key, hook in list(layer._forward_pre_hooks.items()):
            if isinstance(hook, BlockStart):
                del layer._forward_pre_hooks[key]
