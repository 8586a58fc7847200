"""Keep the optimizer that trains a model, and check that later ones fit the program."""

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group
from poptorch._logging import logger
from poptorch.optim import Optimizer, Reading, read_optimizer
from poptorch.optimizer_state import StateOnDevice
from poptorch.unexpected import ExpectedAttributes
from poptorch.updates import check_replacement, groups_of

# The states that torch's own optimizers have left on a device; these optimizers do not show them.
_left: "WeakKeyDictionary[torch.optim.Optimizer, dict[str, Tensor]]" = WeakKeyDictionary()


class OptimizerInUse:
    """The optimizer of an executor.

    Invariant: `reading` has the numbers that are in force, which `optimizer` may no longer have.

    Args:
        optimizer: the first one.
        relaxed: say at level DEBUG, and not as a warning, that an attribute is ignored.
        automatic_loss_scaling: the loss scale follows the gradients, so it is variable.

    Raises:
        AssertionError, ValueError, poptorch.Error: an optimizer that the device cannot have.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        relaxed: bool,
        automatic_loss_scaling: bool = False,
    ) -> None:
        self.optimizer, self._automatic = optimizer, automatic_loss_scaling
        self.reading = self._read(optimizer)
        say = logger.debug if relaxed else logger.warning
        self._expected = ExpectedAttributes(optimizer, say)
        self._device: StateOnDevice | None = None

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the backward pass."""
        return float(self.reading.settings["loss_scaling"])

    @property
    def loss_scale_is_variable(self) -> bool:
        """Whether another optimizer may bring another loss scale."""
        return not self.reading.loss_scaling_is_constant

    @property
    def combined_accumulator(self) -> bool:
        """Whether gradients and the optimizer's state share their tensors."""
        return bool(self.reading.settings["use_combined_accum"])

    @property
    def device(self) -> StateOnDevice | None:
        """Its state on the device, where there is a program."""
        return self._device

    def groups(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
    ) -> tuple[Group, ...]:
        """The update of every group, with the numbers that are in force."""
        return groups_of(self.reading, parameters)

    def connect(self, device: StateOnDevice | None) -> None:
        """Let the optimizer's state be that of a compiled model, or of none any more.

        A state that the optimizer has from an earlier program is copied to the new one.
        """
        self._disconnect()
        if device is None:
            return
        own = self.optimizer
        if isinstance(own, Optimizer):
            own.connect(device)
            if own.has_state():
                own.ipu_state_is_dirty = True
            else:
                own.host_state_is_dirty = True
        elif own in _left:
            device.write(_left[own])
        self._device = device
        _left.pop(own, None)  # last: after an interrupt it is written again

    def _disconnect(self) -> None:
        """Let the optimizer keep the device's state; for torch's own it is kept here, for the next
        program."""
        device, own = self._device, self.optimizer
        if isinstance(own, Optimizer):
            self._release()
        elif device is not None:
            _left[own] = device.read_optimizer_state()["ipu_state"]
        self._device = None

    def _release(self) -> None:
        """Let an optimizer of this package keep the state, if it is still this device's."""
        device, own = self._device, self.optimizer
        if device is not None and isinstance(own, Optimizer) and own.is_connected(device):
            own.connect(None)

    def upload(self) -> None:
        """Write a state that the optimizer has loaded to the device."""
        own = self.optimizer
        if self._device is not None and isinstance(own, Optimizer) and own.ipu_state_is_dirty:
            self._device.write(own.get_state_dict()["ipu_state"] or {})
            own.ipu_state_is_dirty, own.host_state_is_dirty = False, True

    def steps_begin(self) -> None:
        """Note that the device's state may be newer than the optimizer's from now on."""
        if isinstance(self.optimizer, Optimizer):
            self.optimizer.host_state_is_dirty = True

    def replace(self, optimizer: torch.optim.Optimizer, *, compiled: bool) -> None:
        """Put the numbers of an optimizer, the same or another, in force. The state stays.

        Args:
            compiled: there is a program, which the new numbers must fit.
        """
        reading = self._read(optimizer)
        self._expected.warn(optimizer, reading)
        if compiled:
            check_replacement(self.reading, reading)
        factor = reading.settings["loss_scaling"] / self.loss_scale
        another = optimizer is not self.optimizer
        changed = another or reading.numbers != self.reading.numbers
        if another:
            self._release()
        self.optimizer, self.reading, device = optimizer, reading, self._device
        if device is not None:
            device.follow(reading, factor)
            if isinstance(optimizer, Optimizer):
                if another:
                    optimizer.connect(device)
                if changed and not optimizer.ipu_state_is_dirty:
                    optimizer.host_state_is_dirty = True

    def read_again(self) -> None:
        """Put the optimizer's present numbers in force, for a compilation."""
        self.reading = self._read(self.optimizer)

    def _read(self, optimizer: torch.optim.Optimizer) -> Reading:
        return read_optimizer(optimizer, automatic_loss_scaling=self._automatic)
