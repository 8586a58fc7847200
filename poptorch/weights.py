"""Exchange weights between a model on the host and its program on the device."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch.devices import acquire, release
from poptorch.enums import ConnectionType
from poptorch.errors import createPoptorchError, require
from poptorch.options import Options
from poptorch.trainers import Trainers
from poptorch.wrapping import WeightLink


class DeviceWeights:
    """The part of an executor that knows who has the newest weights.

    Invariant: what the device has is newer than what the host has exactly while `_link.dirty`.

    Args:
        options: the executor's own.
        made_from: the user's module or function.
    """

    model: Any

    def __init__(self, options: Options, made_from: Any) -> None:
        self._options = options
        self._core: CompiledModel | None = None
        self._attached = False
        self._link = WeightLink(self)
        self._trainers = Trainers(made_from, but=self._link)

    def isCompiled(self) -> bool:
        """Whether there is a program."""
        return self._core is not None

    def isAttachedToDevice(self) -> bool:
        """Whether the program has its IPUs."""
        return self._attached

    def destroy(self) -> None:
        """Drop the program."""
        raise NotImplementedError

    def copyWeightsToHost(self) -> None:
        """Copy the device's parameters and buffers to the model."""
        core = self._ready()
        self._link.dirty = False
        with self._link.quiet():
            core.read_weights()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy them if the device's are newer; say whether they were copied."""
        if not (self.isCompiled() and self._link.dirty):
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToDevice(self) -> None:
        """Copy the model's parameters and buffers to the device; the host's values win."""
        core = self._ready()
        self._link.dirty = False
        with self._link.quiet():
            core.write_weights()

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers that `Options.updatableNamedBuffers` names to the device."""
        core = self._ready()
        names = self._options._Popart.options.get("updatableNamedBuffers", ())
        if not names:
            raise createPoptorchError(
                "No buffer may be copied alone: name those that change in "
                "poptorch.Options.updatableNamedBuffers()"
            )
        with self._link.quiet():
            core.write_weights(names)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load weights into the model, and on to the device if there is a program on it."""
        result = self.model.load_state_dict(state_dict, strict=strict)
        if self._attached:
            self.copyWeightsToDevice()
        return result

    def attachToDevice(self) -> None:
        """Reserve the IPUs again, and copy the weights to them."""
        self._ready()
        require(
            self._options.connection_type != ConnectionType.Never,
            "Trying to attach to an offline device (ConnectionType.Never)",
        )
        if self._attached:
            raise createPoptorchError("Device is already attached")
        acquire(self._ipu_id, self)
        self.copyWeightsToDevice()
        self._attached = True

    def detachFromDevice(self) -> None:
        """Copy the weights to the host if they have changed, and release the IPUs."""
        self._ready()
        if not self._attached:
            raise createPoptorchError("Device is not attached")
        self.copyWeightsToHostIfNeeded()
        self._detach()

    @contextmanager
    def _attaching(self) -> Iterator[None]:
        """Reserve the IPUs for a compilation, and keep them if it succeeds."""
        if self._options.connection_type == ConnectionType.Never:
            yield
            return
        acquire(self._ipu_id, self)
        try:
            yield
            self._attached = True
        finally:
            if not self._attached:
                release(self._ipu_id, self)

    def _detach(self) -> None:
        self._attached = False
        release(self._ipu_id, self)

    @property
    def _ipu_id(self) -> int | None:
        return self._options.ipu_id if self._options.exists("ipu_id") else None

    def _follow(self) -> None:
        """Take over what other executors have learnt since, for tensors of the same model."""
        if self._trainers.fetch() and self.isCompiled():
            self.copyWeightsToDevice()

    def _ready(self) -> CompiledModel:
        if self._core is None:
            raise createPoptorchError("Model has not been compiled or has been destroyed.")
        return self._core
