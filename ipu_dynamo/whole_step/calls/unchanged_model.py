"""Notice that a model is no longer the one that its program was compiled from.

Most checks find nothing: they run over all of a model without a line of Python for each tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ipu_dynamo.capture.outside import OutsideTensor, changed
from ipu_dynamo.capture.private.own_tensors import own_tensor
from ipu_dynamo.capture.swap import Model
from ipu_dynamo.errors import InputError

_IN_PLACE = "change values in place (copy_, load_state_dict without assign), or compile again"
_REPLACED = "{} is not the one that the program was compiled with: it was replaced or removed"
_END = object()
_requires_grad, _training = attrgetter("requires_grad"), itemgetter("training")


class _Slot(NamedTuple):
    """The value of a module's attribute when the model was compiled."""

    held: dict[str, Any]  # the module's own dictionary
    name: str
    value: object
    what: str  # for errors: "parameter fc.weight"


@dataclass(frozen=True)
class _ScriptAttributes:
    """The attributes of a module of TorchScript, which are in no dictionary of Python's."""

    module: nn.Module

    def __getitem__(self, name: str) -> Any:
        return getattr(self.module, name)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers."""
    named = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return dict(chain(*named))


class UnchangedModel:
    """The tensors, submodules and modes that a model had when it was compiled.

    Args:
        model: a callable that is no module has none of these.
        outside: other tensors, which the program has by their value.
    """

    def __init__(self, model: Model, outside: Sequence[OutsideTensor] = ()) -> None:
        self._outside = outside
        modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
        self._slots = [
            _Slot(held, name, value, f"{kind} {path}.{name}" if path else f"{kind} {name}")
            for path, module in modules.items()
            if not isinstance(module, torch.jit.ScriptModule)
            for kind, held in (
                ("parameter", module._parameters),
                ("buffer", module._buffers),
                ("module", module._modules),
            )
            for name, value in held.items()
        ]
        self._dictionaries = list({id(slot.held): slot.held for slot in self._slots}.values())
        self._values = [*(slot.value for slot in self._slots), _END]
        self._scripts = [  # their tensors are no entries of a dictionary
            (path, module, _tensors(module))
            for path, module in modules.items()
            if isinstance(module, torch.jit.ScriptModule)
        ]
        self._paths = list(modules)
        scripts = {path: _ScriptAttributes(module) for path, module, _ in self._scripts}
        self._attributes = [scripts.get(path, vars(module)) for path, module in modules.items()]
        self._modes = [module.training for module in modules.values()]
        named = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
        self._names, self._parameters = list(named), list(named.values())
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def check_tensors(self) -> None:
        """Hold the model to the tensors and submodules that it had.

        Raises:
            InputError: one was replaced or removed.
        """
        for path, script, tensors in self._scripts:
            now = _tensors(script)
            for name, tensor in tensors.items():
                if now.get(name) is not tensor:
                    raise InputError(_REPLACED.format(f"{path}.{name}"), hint=_IN_PLACE)
        values = chain.from_iterable(map(dict.values, self._dictionaries))
        if all(map(is_, chain(values, (_END,)), self._values)):
            return
        for held, name, value, what in self._slots:  # some may only have been added
            if own_tensor(held.get(name)) is not value:  # another thread may trace it
                raise InputError(_REPLACED.format(what), hint=_IN_PLACE)

    def check_trainable(self) -> None:
        """Hold parameters to whether they need a gradient.

        Raises:
            InputError: `requires_grad` of one has changed.
        """
        if all(map(is_, map(_requires_grad, self._parameters), self._trainable)):
            return
        for name, parameter, trained in zip(
            self._names, self._parameters, self._trainable, strict=True
        ):
            if parameter.requires_grad != trained:
                raise InputError(
                    f"parameter {name} had requires_grad={trained} when the program was compiled, "
                    f"and has {parameter.requires_grad} now",
                    hint="set it back, or compile again",
                )

    def changed_mode(self) -> str | None:
        """Say which module is in another mode than when it was compiled; None: no module is."""
        if all(map(is_, map(_training, self._attributes), self._modes)):
            return None
        modules = zip(self._paths, self._attributes, self._modes, strict=True)
        path, was_training = next(
            (path, mode) for path, held, mode in modules if held["training"] is not mode
        )
        was, now = ("train", "eval") if was_training else ("eval", "train")
        what = f"module {path}" if path else "the model"
        return f"{what} is in {now} mode, and was in {was} mode when it was compiled"

    def check_outside(self) -> None:
        """Hold tensors that became constants to their values.

        Raises:
            InputError: one has another value.
        """
        if self._outside and (change := changed(self._outside)) is not None:
            raise InputError(
                change, hint="make it a buffer (register_buffer) or an argument, or compile again"
            )

    def check_mode(self) -> None:
        """Hold modules to train or eval mode.

        Raises:
            InputError: one is in the other mode.
        """
        if (change := self.changed_mode()) is not None:
            raise InputError(
                f"{change}, which decided what dropout and batch norm do in the program",
                hint="call train() or eval() first, or compile again",
            )
