"""Let a module that is being trained on the device fetch its weights whenever it is touched."""

import copy
import types
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from ipu_dynamo.capture.private.own_tensors import own_slots
from ipu_dynamo.inspection.inspect_model import captured
from ipu_dynamo.inspection.inspection import Inspection
from ipu_dynamo.ops.private.native import DisableTorchFunctionSubclass
from ipu_dynamo.whole_step.weights.dual_view import DualView
from poptorch.errors import createPoptorchError
from poptorch.host_weights import host_lock

_READ_WEIGHTS = frozenset({"_parameters", "_buffers", "forward"})


class WrappedTensor:
    """Mixin of the classes of parameters and buffers of wrapped modules.

    Several executors may train modules that share a tensor: its class has a layer of each.
    """

    _device: ClassVar[DualView]  # of the executor that a layer belongs to
    _layers: "ClassVar[tuple[type[WrappedTensor], ...]]"  # in the order of wrapping
    _plain: ClassVar[type[Tensor]]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        kinds: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        wrapped = [kind for kind in kinds if issubclass(kind, WrappedTensor)]
        for layer in dict.fromkeys(layer for kind in wrapped for layer in kind._layers):
            layer._device.refresh()
        with DisableTorchFunctionSubclass():
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
    """Marks the class of a wrapped module."""

    _poptorch_device: ClassVar[DualView]
    _poptorch_plain: ClassVar[type[nn.Module]]


def _methods(device: DualView, plain: type[nn.Module]) -> dict[str, Any]:
    """The own attributes of a wrapped module's class.

    Its first base is the user's class, as libraries expect. A mixin after it could not override its
    methods. A method that is running still works when another thread unwraps the module.
    """

    def __getattribute__(self: Any, name: str) -> Any:
        if name in _READ_WEIGHTS:
            device.refresh()
        return plain.__getattribute__(self, name)

    def copyWeightsToHostIfNeeded(self: Any) -> bool:
        """Fetch the weights if the device has newer ones; say whether they were fetched."""
        return device.fetch()

    def destroy(self: Any) -> None:
        """Destroy the executor that trains this module."""
        if (owner := device.owner) is not None:
            owner.destroy()

    def __ipu_inspect__(self: Any) -> Inspection:
        """Inspect the executor that trains this module."""
        owner = device.owner
        return captured(self) if owner is None else owner.__ipu_inspect__()

    def __copy__(self: Any) -> Any:
        return twin_of(self, lambda state: state)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        def deep(state: Any) -> Any:
            return copy.deepcopy(state, memo)

        return twin_of(self, deep, lambda twin: memo.__setitem__(id(self), twin))

    def twin_of(
        module: Any,
        copied: Callable[[Any], Any],
        made: Callable[[Any], None] = lambda twin: None,
    ) -> Any:
        """A copy of the same class."""
        device.refresh()
        reduced: Any = plain.__reduce_ex__(module, 4)
        make, args, state = reduced[:3]
        twin = make(*args)
        made(twin)
        twin.__setstate__(copied(state))
        return twin

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle as the plain class, so that this package is not needed for loading."""
        device.refresh()
        reduced: Any = plain.__reduce_ex__(self, max(protocol, 2))
        _, args, *rest = reduced
        return (object.__new__, (plain, *args[1:]), *rest)

    methods = (__getattribute__, copyWeightsToHostIfNeeded, destroy, __ipu_inspect__, __copy__)
    return {method.__name__: method for method in (*methods, __deepcopy__, __reduce_ex__)}


class Wrapping:
    """The change of a module's class and of the classes of its parameters and buffers.

    Attributes:
        complete: all classes are changed.
        installed: counts the changes made so far, of all modules.
        parameter_class, buffer_class: the classes of parameters and buffers.
    """

    installed: ClassVar[int] = 0

    def __init__(self, module: nn.Module, device: DualView) -> None:
        self._module, self._device = module, device
        self._plain: type[nn.Module] = type(module)
        self._changed: list[Tensor] = []
        self.complete = False
        self.parameter_class = _layer("PoptorchParameter", _WrappedParameter, device)
        self.buffer_class = _layer("PoptorchBuffer", _WrappedBuffer, device)

    def install(self) -> None:
        """Change the classes.

        Raises:
            RuntimeError: the module is wrapped already.
            poptorch.Error: a buffer of a class of its own.
        """
        module = self._module
        _refuse_wrapped(module)
        parameters, buffers = _tensors(module, "_parameters"), _tensors(module, "_buffers")
        for name, buffer in buffers.items():
            if type(buffer) is not Tensor and not isinstance(buffer, WrappedTensor):
                raise createPoptorchError(
                    f"All buffers must be an instance of torch.Tensor (Got {type(buffer)} for "
                    f"{name})",
                    id="model",
                )
        with host_lock():
            _refuse_wrapped(module)  # by another thread, meanwhile
            self._plain = type(module)
            for parameter in parameters.values():
                self._change(parameter, self.parameter_class)
            for buffer in buffers.values():
                self._change(buffer, self.buffer_class)
            module.__class__ = _new_class(
                f"Poptorch{self._plain.__name__}",
                (self._plain, WrappedModule),
                **_methods(self._device, self._plain),
                _poptorch_device=self._device,
                _poptorch_plain=self._plain,
                __module__=self._plain.__module__,
                __doc__=self._plain.__doc__,
            )
            Wrapping.installed += 1
            self.complete = True

    def remove(self) -> None:
        """Give every object the class back that it has without this change."""
        with host_lock():
            self.complete = False
            module = self._module
            if isinstance(module, WrappedModule) and module._poptorch_device is self._device:
                module.__class__ = self._plain  # type: ignore[assignment]
            own = (self.parameter_class, self.buffer_class)
            for tensor in self._changed:
                kind: Any = type(tensor)
                if issubclass(kind, WrappedTensor):  # else it was unwrapped before
                    others = tuple(layer for layer in kind._layers if layer not in own)
                    tensor.__class__ = _wrapped_class(kind._plain, others)
            self._changed = []

    def _change(self, tensor: Tensor, layer: type[Any]) -> None:
        kind: Any = type(tensor)
        plain, layers = kind, ()
        if issubclass(kind, WrappedTensor):  # shared with another module that is being trained
            plain, layers = kind._plain, kind._layers
        self._changed.append(tensor)
        tensor.__class__ = _wrapped_class(plain, (*layers, layer))


def _tensors(module: nn.Module, kind: str) -> dict[str, Tensor]:
    """The tensors of a kind, each once; no module's hook is called, which could wait."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, each in module.named_modules():
        for name, tensor in own_slots(each, kind).items():
            if tensor is not None:
                found.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
    return dict(found.values())


def _refuse_wrapped(module: nn.Module) -> None:
    if isinstance(module, WrappedModule):
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. Call "
            "model.destroy() on the model to unwrap before wrapping again."
        )


def plain_copy(module: Any) -> Any:
    """A shallow copy of a module, of its own class; any other callable is returned as it is."""
    if not isinstance(module, nn.Module):
        return module
    twin = copy.copy(module)
    if isinstance(twin, WrappedModule):
        twin.__class__ = twin._poptorch_plain  # type: ignore[assignment]
    return twin


def _layer(name: str, base: type[Any], device: DualView) -> type[Any]:
    """The class of tensors that only the executor with this device has wrapped."""
    plain = nn.Parameter if issubclass(base, nn.Parameter) else Tensor
    layer: Any = _new_class(name, (base,), _device=device, _plain=plain)
    layer._layers = (layer,)
    return layer


def _wrapped_class(plain: type[Any], layers: tuple[type[Any], ...]) -> type[Any]:
    """The class of a wrapped tensor, whose class without wrappers is `plain`."""
    if not layers:
        return plain
    own = () if plain in (nn.Parameter, Tensor) else (plain,)
    if len(layers) == 1 and not own:
        return layers[0]
    bases = (*reversed(layers), *own)
    return _new_class(layers[-1].__name__, bases, _layers=layers, _plain=plain)


def _new_class(name: str, bases: tuple[type[Any], ...], **attributes: Any) -> type[Any]:
    """A class made at run time, with the metaclass that its bases ask for."""
    own = {"__module__": __name__, **attributes}
    return types.new_class(name, bases, exec_body=lambda body: body.update(own))
