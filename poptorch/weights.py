"""Exchange weights between a model on the host and its program on the device."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ipu_dynamo.whole_step.compiled_model import CompiledModel
from poptorch.core_errors import core_errors
from poptorch.devices import acquire, release
from poptorch.enums import ConnectionType
from poptorch.errors import createPoptorchError, require
from poptorch.options import Options
from poptorch.ownership import WeightsOnDevice
from poptorch.trainers import Trainers


class DeviceWeights:
    """The part of an executor that exchanges weights with its device.

    Args:
        options: the executor's own.
        model: the module that it runs, with the user's tensors.
    """

    model: Any

    def __init__(self, options: Options, model: Any) -> None:
        self._options = options
        self._core: CompiledModel | None = None
        self._attached = False
        self._weights = WeightsOnDevice(self)
        self._trainers = Trainers(model, own=self._weights)

    def isCompiled(self) -> bool:
        """Whether there is a program."""
        return self._core is not None

    def isAttachedToDevice(self) -> bool:
        """Whether the program has its IPUs."""
        return self._attached

    @property
    def _is_attached(self) -> bool:
        """As libraries for PopTorch call it."""
        return self._attached

    def destroy(self) -> None:
        """Drop the program."""
        raise NotImplementedError

    def copyWeightsToHost(self) -> None:
        """Copy the device's parameters and buffers to the model.

        What another executor on the same tensors has trained since stays as it is.
        """
        self._ready()
        self._follow()

        def copy() -> None:
            core = self._ready()
            self._send(core)
            self._weights.device_wins()
            self._weights.fetch(core)

        self._weights.alone(copy)

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy those of them that are newer on the device; say whether any was.

        After an update that failed half-way, the host keeps what it has.
        """

        def copy() -> bool:
            if self._core is None or not self._weights.newer_on_device:
                return False
            if not self._core.has_weights():
                return False
            self._weights.fetch(self._core)
            return True

        return self._weights.alone(copy)

    def copyWeightsToDevice(self) -> None:
        """Copy the model's parameters and buffers to the device; the host's values win."""
        self._ready()
        self._follow()

        def copy() -> None:
            self._upload()
            self._weights.uploaded()

        self._weights.alone(copy)

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers that `Options.updatableNamedBuffers` names to the device."""
        self._ready()
        names = self._options._Popart.options.get("updatableNamedBuffers")
        if names is None:
            raise createPoptorchError(
                "No named buffers marked as updatable via updatableNamedBuffers option: name "
                "those that change in poptorch.Options.updatableNamedBuffers()",
                id="option",
            )

        def copy() -> None:
            self._weights.host_wins(names)
            self._send(self._ready())

        self._weights.alone(copy)

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
            raise createPoptorchError("Device is already attached", id="device")
        self._follow()
        self._weights.alone(self._attach)

    def detachFromDevice(self) -> None:
        """Copy what has changed of weights and optimizer to the host, and release the IPUs."""
        self._ready()
        if not self._attached:
            raise createPoptorchError("Device is not attached", id="device")

        def detach() -> None:
            self.copyWeightsToHostIfNeeded()
            self._read_optimizer_state()
            self._detach()

        self._weights.alone(detach)

    def _read_optimizer_state(self) -> None:
        """Copy the optimizer's state to the host if it has changed."""

    def _attach(self) -> None:
        acquire(self._ipu_id, self)
        self.copyWeightsToHostIfNeeded()
        self._upload()
        self._attached = True

    @contextmanager
    def _attaching(self) -> Iterator[None]:
        """Reserve the IPUs for a compilation, and keep them if it succeeds; `Always` does that."""
        if self._options.connection_type != ConnectionType.Always:
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
        """Note what other executors have trained since, for the device to get before it runs."""
        if self._weights.is_mine():
            return  # what is going on began with it
        news = self._trainers.fetch()
        if not news:
            return

        def follow() -> None:
            if self._core is not None:
                changed = self._trainers.changed(news)
                tensors = self._core.weights()
                names = {name for name, tensor in tensors.items() if id(tensor) in changed}
                self._weights.host_wins(names - self._weights.newer_on_device)
            self._trainers.follow(news)

        self._weights.alone(follow)

    def _upload(self) -> None:
        """Copy all weights of the host to the device."""
        self._weights.host_wins()
        self._send(self._ready())

    def _send(self, core: CompiledModel) -> None:
        """Copy what is newer on the host to the device."""
        if self._weights.newer_on_host:
            with core_errors("copying weights to the device", self._options):
                self._weights.send(core)

    def _ready(self) -> CompiledModel:
        if self._core is None:
            raise createPoptorchError(
                "Model has not been compiled or has been destroyed.", id="call"
            )
        return self._core
