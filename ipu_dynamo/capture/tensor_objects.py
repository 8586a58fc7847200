"""Follow forward where it uses tensors as Python objects: copies them, or gives them a class."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from ipu_dynamo.capture.private.tracing import flatten, is_fake, is_real, unrecorded
from ipu_dynamo.errors import CompileError, called_from
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced


@contextmanager
def objects_followed() -> Iterator[None]:
    """Let forward use tensors as Python objects, in ways that record no operator.

    `copy.copy` gives the same memory, without a gradient. A tensor of a class of the user's, made
    from Python values, is a constant. Others are refused.
    """

    def make(new: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(cls: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
            if any(map(is_fake, flatten((args, kwargs))[0])):
                raise subclass_error(cls)
            with unrecorded():
                return new(cls, *args, **kwargs)

        return in_this_thread(made, new)

    def seen_as(tensor: Tensor, kind: type[Tensor]) -> Any:
        if not is_users_class(kind):
            return as_subclass(tensor, kind)
        if not is_real(tensor):
            raise subclass_error(kind)
        with unrecorded():
            return as_subclass(tensor, kind)

    def copied(tensor: Tensor, protocol: int) -> tuple[Any, ...]:
        return _returned, (tensor.detach(),)

    as_subclass: Any = Tensor.as_subclass
    with ExitStack() as stack:
        methods: dict[str, Any] = {"as_subclass": seen_as, "__reduce_ex__": copied}
        for name, instead in methods.items():
            original = getattr(Tensor, name)
            stack.enter_context(replaced(Tensor, name, in_this_thread(instead, original)))
        for kind in _subclasses(Tensor):
            if is_users_class(kind):
                new: Any = kind.__new__
                stack.enter_context(replaced(kind, "__new__", make(new)))
        yield


def _subclasses(kind: type[Tensor]) -> Iterator[type[Tensor]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def is_users_class(kind: type) -> bool:
    """Whether a class of tensors is neither PyTorch's nor of this project."""
    return kind.__module__.partition(".")[0] not in ("torch", "ipu_dynamo", "poptorch")


def subclass_error(kind: type) -> CompileError:
    return CompileError(
        f"forward computes with a {kind.__name__}, a subclass of torch.Tensor, and a trace cannot "
        "follow what the class does",
        where=called_from(),
        hint="compute with plain tensors; torch.compile(backend='ipu') takes subclasses",
    )


def _returned(tensor: Tensor) -> Tensor:
    return tensor
