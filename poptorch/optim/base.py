"""Define the common part of this package's optimizers: own attributes, the device's state."""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch

from poptorch._logging import logger
from poptorch.errors import require
from poptorch.optim.variable import VariableAttributes
from poptorch.versions import Versions

State = dict[str, Any]
_ACCUMULATION_TYPES = (torch.float16, torch.float32)
_KEYS = ("ipu_state", "ipu_param")


class DeviceState(Protocol):
    """The object that an executor passes to `Optimizer.connect` while it holds the state."""

    def read_optimizer_state(self) -> State:
        """The device's state: `ipu_state` and `ipu_param`, each from names to tensors."""


class Optimizer(torch.optim.Optimizer):
    """The part that the optimizers of this package share.

    An executor that trains with an optimizer calls `connect` once, sets `host_state_is_dirty`
    before each training call, and before that uploads `get_state_dict()` and clears
    `ipu_state_is_dirty` where that is set.
    """

    _OWN: ClassVar[Mapping[str, Any]] = {}  # arguments that torch's class lacks -> defaults

    variable_attrs: VariableAttributes
    _versions: Versions
    _device: DeviceState | None
    _ipu: State

    def _construct(
        self,
        parent: type[torch.optim.Optimizer],
        params: Any,
        arguments: Mapping[str, Any],
        **more: Any,
    ) -> None:
        """Set the optimizer up from what its constructor was called with.

        Args:
            parent: torch's class, which takes the arguments that it knows.
            params: parameters or groups of them.
            arguments: all other arguments by name; None stands for "not given".
            more: arguments for `parent` that the constructor does not have.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        known = inspect.signature(parent).parameters
        for_parent = {name: given[name] for name in given if name in known}
        parent.__init__(self, params, **for_parent, **more)
        for name, default in self._OWN.items():
            setattr(self, name, given.get(name, default))
        self._check_accumulation_types()
        self.variable_attrs = VariableAttributes(given, {*self.defaults, *arguments})
        self._device = None
        self._ipu = dict.fromkeys(_KEYS)
        self._versions = Versions()

    def _check_accumulation_types(self) -> None:
        for name in self._OWN:
            if name.endswith("accum_type"):
                require(
                    getattr(self, name) in _ACCUMULATION_TYPES,
                    "Accumulation types must be either torch.float32 or torch.float16 "
                    f"({name} is {getattr(self, name)})",
                )

    # the device's state

    @property
    def ipu_state_is_dirty(self) -> bool:
        """Whether the device's copy of the state is older than the host's."""
        return self._versions.device < self._versions.host

    @ipu_state_is_dirty.setter
    def ipu_state_is_dirty(self, older: bool) -> None:
        if older:
            self._versions.host_changes()
        elif self.ipu_state_is_dirty:
            self._versions.device = self._versions.host

    @property
    def host_state_is_dirty(self) -> bool:
        """Whether the host's copy of the state is older than the device's."""
        return self._versions.host < self._versions.device

    @host_state_is_dirty.setter
    def host_state_is_dirty(self, older: bool) -> None:
        if older:
            self._versions.device_changes()
        elif self.host_state_is_dirty:
            self._versions.host = self._versions.device

    def connect(self, device: DeviceState | None) -> None:
        """Let `device` hold the state from now on; None: read it once more, then disconnect.

        Args:
            device: the executor that holds the state from now on.
        """
        self.get_state_dict()
        self._device = device

    def is_connected(self, device: DeviceState) -> bool:
        """Whether `device` holds the state.

        Args:
            device: an executor.
        """
        return self._device is device

    def has_state(self) -> bool:
        """Whether there is a state that came from a device or a checkpoint."""
        return all(self._ipu[key] is not None for key in _KEYS)

    def get_state_dict(self) -> State:
        """The device's state, read from it if that is newer; values are None if there is none."""
        if self.host_state_is_dirty and self._device is not None:
            version = self._versions.device  # steps of another thread meanwhile leave it dirty
            state = self._device.read_optimizer_state()
            self._ipu = {key: state[key] for key in _KEYS}
            self._versions.host = version
        return dict(self._ipu)

    def set_state_dict(self, state: State) -> None:
        """Replace the device's state; the executor uploads it before its next call.

        With None for either, as before a compilation, the device keeps its values.

        Args:
            state: has `ipu_state` and `ipu_param`, each from names to tensors, or None.

        Raises:
            RuntimeError: the dictionary is empty, or lacks either.
        """
        if not state:
            raise RuntimeError("Cannot load optimizer state dictionary because it is empty.")
        if not all(key in state for key in _KEYS):
            raise RuntimeError(
                "Only IPU optimizer states can be loaded onto the IPU. The dictionary lacks "
                f"{' or '.join(key for key in _KEYS if key not in state)}"
            )
        if any(state[key] is None for key in _KEYS):
            return
        self._ipu = {key: state[key] for key in _KEYS}
        self._versions.host_changes()

    def state_dict(self) -> State:
        """Torch's state and groups, and `ipu_state` and `ipu_param` of the device."""
        if self._device is not None and not self.host_state_is_dirty:
            logger.debug("Using cached optimiser state dict")
        return {**super().state_dict(), **self.get_state_dict()}

    def load_state_dict(self, state_dict: State) -> None:
        """Restore torch's part at once, and the device's part before the next call of a model.

        Args:
            state_dict: as `state_dict()` returns it.

        Raises:
            RuntimeError: the dictionary is empty, or of an optimizer of torch's own; of that
                torch's part is in force then.
        """
        if state_dict:
            super().load_state_dict({k: v for k, v in state_dict.items() if k not in _KEYS})
        self.set_state_dict(state_dict)

    # copying and pickling

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in self._OWN}
        state, versions = self.get_state_dict(), Versions()
        if self.has_state():
            versions.host_changes()
        return {
            **super().__getstate__(),
            **own,
            "variable_attrs": self.variable_attrs.copy(),
            "_ipu": state,
            "_versions": versions,
            "_device": None,
        }


def passed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A constructor's `locals()` without the names that are no settings."""
    return {
        name: value
        for name, value in arguments.items()
        if name not in ("self", "params", "__class__")
    }
