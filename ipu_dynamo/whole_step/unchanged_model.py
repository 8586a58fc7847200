"""Notice that a model is no longer the one that its program was compiled from."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ipu_dynamo.capture.swap import Model
from ipu_dynamo.errors import InputError

_IN_PLACE = "change values in place (copy_, load_state_dict without assign), or compile again"


class _Slot(NamedTuple):
    """What a module held under a name when it was compiled."""

    held: dict[str, Any]  # the module's own dictionary
    name: str
    value: object
    what: str  # for errors: "parameter fc.weight"


class _Mode(NamedTuple):
    """The mode of a module when it was compiled."""

    attributes: dict[str, Any]  # the module's own dictionary
    training: bool
    path: str


class UnchangedModel:
    """The tensors, submodules and modes that a model had when it was compiled.

    A check costs one look into a dictionary for each of them.

    Args:
        model: a callable that is no module has none of these.
    """

    def __init__(self, model: Model) -> None:
        self._slots: list[_Slot] = []
        self._modes: list[_Mode] = []
        self._trainable: list[tuple[str, Tensor, bool]] = []
        if not isinstance(model, nn.Module):
            return
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            self._modes.append(_Mode(vars(module), module.training, path))
            for kind, held in (
                ("parameter", module._parameters),
                ("buffer", module._buffers),
                ("module", module._modules),
            ):
                for name, value in held.items():
                    self._slots.append(_Slot(held, name, value, f"{kind} {prefix}{name}"))
        self._trainable = [(name, p, p.requires_grad) for name, p in model.named_parameters()]

    def check_tensors(self) -> None:
        """Hold the model to the tensors and submodules that it had.

        Raises:
            InputError: one was replaced or removed.
        """
        for held, name, value, what in self._slots:
            if held.get(name) is not value:
                raise InputError(
                    f"{what} is not the one that the program was compiled with: it was "
                    "replaced or removed",
                    hint=_IN_PLACE,
                )

    def check_trainable(self) -> None:
        """Hold parameters to whether they need a gradient.

        Raises:
            InputError: `requires_grad` of one has changed.
        """
        for name, parameter, wanted in self._trainable:
            if parameter.requires_grad != wanted:
                raise InputError(
                    f"parameter {name} had requires_grad={wanted} when the program was compiled, "
                    f"and has {parameter.requires_grad} now",
                    hint="set it back, or compile again",
                )

    def changed_mode(self) -> str | None:
        """What module is in another mode than it was; None: all are in theirs."""
        for attributes, training, path in self._modes:
            if attributes.get("training") is not training:
                was, now = ("train", "eval") if training else ("eval", "train")
                what = f"module {path}" if path else "the model"
                return f"{what} is in {now} mode, and was in {was} mode when it was compiled"
        return None

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
