"""Let a module that is being trained on the device fetch its weights whenever it is touched."""

import copy
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from poptorch.errors import createPoptorchError

_READ_WEIGHTS = frozenset({"_parameters", "_buffers", "forward"})


class Owner(Protocol):
    """The executor whose device has the newest weights."""

    def copyWeightsToHostIfNeeded(self) -> bool: ...

    def destroy(self) -> None: ...


class WeightLink:
    """Connects a wrapped module, and who infers from it, with the executor that trains it.

    Args:
        owner: the executor; it is held weakly.

    Attributes:
        version: counts the calls that changed the device's weights.
        dirty: the host's weights are older than the device's.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self.version = 0
        self.dirty = False
        self._quiet = 0

    @property
    def owner(self) -> Owner | None:
        """The executor, while it lives."""
        return self._owner()

    def trained(self) -> None:
        """Note that the device's weights have changed."""
        self.version += 1
        self.dirty = True

    def refresh(self) -> None:
        """Bring the host's weights up to date; no-op inside `quiet`."""
        if self.dirty and not self._quiet and (owner := self.owner) is not None:
            owner.copyWeightsToHostIfNeeded()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Let the executor's own code touch weights without fetching them."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1


class WrappedTensor:
    """Mixin of the classes of a wrapped module's parameters and buffers."""

    _link: ClassVar[WeightLink]
    _plain: ClassVar[type[Tensor]]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        kinds: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for link in {kind._link for kind in kinds if issubclass(kind, WrappedTensor)}:
            link.refresh()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _WrappedParameter(WrappedTensor, nn.Parameter):
    """A parameter; pickling gives a plain one (`nn.Parameter` does that itself)."""

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))


class _WrappedBuffer(WrappedTensor, Tensor):
    """A buffer; pickling gives a plain one, copying keeps the class."""

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        twin = copy.deepcopy(self.as_subclass(Tensor), memo).as_subclass(type(self))
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class WrappedModule:
    """Mixin of the class of a wrapped module."""

    _poptorch_link: ClassVar[WeightLink]
    _poptorch_plain: ClassVar[type[nn.Module]]

    def __getattribute__(self, name: str) -> Any:
        if name in _READ_WEIGHTS:
            object.__getattribute__(self, "_poptorch_link").refresh()
        return super().__getattribute__(name)

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Fetch the weights if the device has newer ones; say whether they were fetched."""
        owner = self._poptorch_link.owner
        return owner is not None and owner.copyWeightsToHostIfNeeded()

    def destroy(self) -> None:
        """Destroy the executor that trains this module."""
        if (owner := self._poptorch_link.owner) is not None:
            owner.destroy()

    def __copy__(self) -> Any:
        return self._twin(lambda state: state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        def deep(state: Any) -> Any:
            return copy.deepcopy(state, memo)

        return self._twin(deep, lambda twin: memo.__setitem__(id(self), twin))

    def _twin(
        self,
        copied: Callable[[Any], Any],
        made: Callable[[Any], None] = lambda twin: None,
    ) -> Any:
        """A copy of the same class."""
        self._poptorch_link.refresh()
        reduced: Any = super().__reduce_ex__(4)
        make, args, state = reduced[:3]
        twin = make(*args)
        made(twin)
        twin.__setstate__(copied(state))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain class, so that this package is not needed for loading."""
        self._poptorch_link.refresh()
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        _, args, *rest = reduced
        return (object.__new__, (self._poptorch_plain, *args[1:]), *rest)


class Wrapping:
    """The change of a module's class and of the classes of its parameters and buffers.

    Attributes:
        installed: counts the changes made so far, of all modules.
        parameter_class, buffer_class: what parameters and buffers become.
    """

    installed: ClassVar[int] = 0

    def __init__(self, module: nn.Module, link: WeightLink) -> None:
        self._module, self._link = module, link
        self._plain: type[nn.Module] = type(module)
        self._changed: list[tuple[Tensor, type[Tensor]]] = []
        self.parameter_class = _derived("PoptorchParameter", _WrappedParameter, link)
        self.buffer_class = _derived("PoptorchBuffer", _WrappedBuffer, link)

    def install(self) -> None:
        """Change the classes.

        Raises:
            RuntimeError: the module is wrapped already.
            poptorch.Error: a buffer of a class of its own.
        """
        module = self._module
        if isinstance(module, WrappedModule):
            raise RuntimeError(
                "Model has already been wrapped in 'poptorch.trainingModel'. Call "
                "model.destroy() on the model to unwrap before wrapping again."
            )
        for name, buffer in module.named_buffers():
            if type(buffer) is not Tensor and not isinstance(buffer, WrappedTensor):
                raise createPoptorchError(
                    f"All buffers must be an instance of torch.Tensor (Got {type(buffer)} for "
                    f"{name})"
                )
        for parameter in module.parameters():
            self._change(parameter, self.parameter_class)
        for buffer in module.buffers():
            self._change(buffer, self.buffer_class)
        module.__class__ = _new_class(
            f"Poptorch{self._plain.__name__}",
            (WrappedModule, self._plain),
            _poptorch_link=self._link,
            _poptorch_plain=self._plain,
            __module__=self._plain.__module__,
            __doc__=self._plain.__doc__,
        )
        Wrapping.installed += 1

    def remove(self) -> None:
        """Give every object its class back."""
        with self._link.quiet():
            if isinstance(self._module, WrappedModule):
                self._module.__class__ = self._plain  # type: ignore[assignment]
            for tensor, plain in self._changed:
                tensor.__class__ = plain
        self._changed = []

    def _change(self, tensor: Tensor, wrapped: type[Tensor]) -> None:
        plain = type(tensor)
        if isinstance(tensor, WrappedTensor):
            return  # shared with another module that is being trained
        if plain not in (nn.Parameter, Tensor):
            wrapped = _new_class(wrapped.__name__, (wrapped, plain), _plain=plain)
        self._changed.append((tensor, plain))
        tensor.__class__ = wrapped


def plain_copy(module: Any) -> Any:
    """A shallow copy of a module, of its own class; any other callable is returned as it is."""
    if not isinstance(module, nn.Module):
        return module
    twin = copy.copy(module)
    if isinstance(twin, WrappedModule):
        twin.__class__ = twin._poptorch_plain  # type: ignore[assignment]
    return twin


@contextmanager
def plain_classes(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give wrapped tensors the classes back that the compiler knows, for a while."""
    wrapped = [(t, type(t)) for t in tensors if isinstance(t, WrappedTensor)]
    for tensor, kind in wrapped:
        tensor.__class__ = kind._plain  # type: ignore[assignment]
    try:
        yield
    finally:
        for tensor, kind in wrapped:
            tensor.__class__ = kind


def _derived(name: str, base: type[Any], link: WeightLink) -> type[Any]:
    plain = nn.Parameter if issubclass(base, nn.Parameter) else Tensor
    return _new_class(name, (base,), _link=link, _plain=plain)


def _new_class(name: str, bases: tuple[type[Any], ...], **attributes: Any) -> type[Any]:
    """A class made at run time, with the metaclass that its bases ask for."""
    own = {"__module__": __name__, **attributes}
    return types.new_class(name, bases, exec_body=lambda body: body.update(own))
