"""Exchange weights between a model on the host and its program on the device.

An executor follows the others that train the same tensors on devices of their own.
"""

import os
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ipu_dynamo.capture.private.own_tensors import own_slots
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.weights.dual_view import DualView, NoSync
from poptorch.core_errors import core_errors
from poptorch.enums import ConnectionType
from poptorch.errors import Error, createPoptorchError, require
from poptorch.host_weights import ReplicaSlices
from poptorch.options import Options
from poptorch.wrapping import WrappedTensor, Wrapping

_POLL_SECONDS = 15.0
_WAIT = "POPTORCH_WAIT_FOR_IPU"  # environment variable: 1 waits where IPUs are busy
_holders: "weakref.WeakValueDictionary[int, object]" = weakref.WeakValueDictionary()


def _deadlock() -> Error:
    return createPoptorchError(
        "two executors wait for each other: a Python operator in a call of each reads a weight "
        "that the other one trains. Read it between the calls",
        id="device",
    )


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
        self._weights, self._slices = DualView(self, _deadlock), ReplicaSlices()
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

        Values that another executor on the same tensors has trained since are not overwritten.
        """
        self._ready()
        self._follow()

        def copy() -> None:
            self._ready()
            self._send()
            self._weights.modify_all_on_device()
            self._weights.sync_host(required=True)

        self._weights.lock.run(copy)

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy those of them that are newer on the device; say whether any was.

        After an update that failed half-way, the host keeps what it has.
        """
        return self._weights.lock.run(self._weights.sync_host)

    def copyWeightsToDevice(self) -> None:
        """Copy the model's parameters and buffers to the device; the host's values win."""
        self._ready()
        self._follow()

        def copy() -> None:
            self._upload()
            self._weights.publish()

        self._weights.lock.run(copy)

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
            self._ready()
            self._weights.modify_host(names)
            self._send()

        self._weights.lock.run(copy)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load weights into the model, and on to the device if there is a program on it.

        Args:
            state_dict: values by name, as for `torch.nn.Module.load_state_dict`.
            strict: refuse missing and unknown names, as torch does.
        """
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
        self._weights.lock.run(self._attach)

    def detachFromDevice(self) -> None:
        """Copy changed weights and optimizer states to the host, and release the IPUs."""
        self._ready()
        if not self._attached:
            raise createPoptorchError("Device is not attached", id="device")

        def detach() -> None:
            self.copyWeightsToHostIfNeeded()
            self._read_optimizer_state()
            self._detach()

        self._weights.lock.run(detach)

    def _read_optimizer_state(self) -> None:
        """Copy the optimizer's state to the host if it has changed."""

    def _attach(self) -> None:
        _acquire(self._ipu_id, self)
        self.copyWeightsToHostIfNeeded()
        self._upload()
        self._attached = True

    @contextmanager
    def _attaching(self) -> Iterator[None]:
        """Reserve the IPUs for a compilation, and keep them if it succeeds; `Always` does that."""
        if self._options.connection_type != ConnectionType.Always:
            yield
            return
        _acquire(self._ipu_id, self)
        try:
            yield
            self._attached = True
        finally:
            if not self._attached:
                _release(self._ipu_id, self)

    def _detach(self) -> None:
        self._attached = False
        _release(self._ipu_id, self)

    @property
    def _ipu_id(self) -> int | None:
        return self._options.ipu_id if self._options.exists("ipu_id") else None

    def _follow(self) -> None:
        """Note what other executors have trained since, for the device to get before it runs."""
        if self._weights.lock.held_here():
            return  # an outer call under the lock has done it
        fetched = self._trainers.fetch()
        if not fetched:
            return

        def follow() -> None:
            self._weights.follow(self._trainers.changed(fetched))
            self._trainers.follow(fetched)

        self._weights.lock.run(follow)

    def _upload(self) -> None:
        """Copy all weights of the host to the device."""
        self._ready()
        self._weights.modify_host()
        self._send()

    def _send(self) -> None:
        """Copy weights that are newer on the host to the device."""
        if self._weights.newer_on_host:
            with core_errors("copying weights to the device", self._options):
                self._weights.sync_device()

    def _ready(self) -> CompiledModel:
        if self._core is None:
            raise createPoptorchError(
                "Model has not been compiled or has been destroyed.", id="call"
            )
        return self._core


class Trainers:
    """The executors that train the tensors of a model, or of modules around or inside it.

    Invariant: `_followed` has a version of each trainer's weights. Changes up to that version are
    on this executor's device, or marked to be copied to it.

    Args:
        model: the module, or one that shares its tensors; any other callable has no trainers.
        own: the weights of the executor that asks.
    """

    def __init__(self, model: Any, own: DualView) -> None:
        self._model, self._own = model, own
        self._followed: dict[DualView, int] = {}
        self._wrappings = -1
        _all[id(self)] = self

    def fetch(self) -> dict[DualView, int]:
        """Bring the host's weights up to date; for each trainer with news, its version.

        No lock of the executor that asks may be held: two that follow each other would wait for
        each other.
        """
        if self._wrappings != (installed := Wrapping.installed):
            self.look()
            self._wrappings = installed  # last: an interrupted look is repeated
        for weights, seen in list(self._followed.items()):
            if weights.owner is None and weights.version == seen:
                self._followed.pop(weights, None)  # it trains no more
        fetched = {w: w.version for w, seen in list(self._followed.items()) if w.version != seen}
        for weights in fetched:
            weights.fetch()
        return fetched

    def look(self) -> None:
        """Note who trains tensors of the model."""
        for weights in trainers_of(self._model):
            if weights is not self._own:
                self._followed.setdefault(weights, 0)

    def changed(self, fetched: dict[DualView, int]) -> frozenset[int]:
        """The ids of the host's tensors whose values these trainers have changed."""
        followed = self._followed  # one that another thread has taken out has nothing new
        changed = (w.changed_since(followed.get(w, w.version)) for w in fetched)
        return frozenset().union(*changed)

    def followed(self) -> NoSync:
        """Return the block for a compilation, which must not wait for those who train.

        Under the lock of compiling no other executor begins to train.
        """
        self.look()
        return NoSync(list(self._followed))

    def follow(self, fetched: dict[DualView, int]) -> None:
        """Note that news have been taken over."""
        self._followed.update(fetched)


_all: "weakref.WeakValueDictionary[int, Trainers]" = weakref.WeakValueDictionary()


def note_trainers() -> None:
    """Let all executors note the trainers, before one stops and cannot be found any more."""
    for reference in _all.valuerefs():  # a list made at once, whatever other threads add
        if (trainers := reference()) is not None:
            trainers.look()


def trainers_of(model: Any) -> list[DualView]:
    """The weights of those who train parameters or buffers of a model, each once.

    Tensors show it and not modules: one inside a wrapped module is not wrapped itself.
    """
    if not isinstance(model, nn.Module):
        return []
    # read past the modules' hooks: their classes are looked at, and no weight has to be fetched,
    # which could wait for another executor
    kinds = ("_parameters", "_buffers")
    held = (own_slots(module, kind) for module in model.modules() for kind in kinds)
    tensors = [tensor for of in held for tensor in of.values()]  # TorchScript's are not wrapped
    kinds_of = map(type, tensors)
    wrapped = [kind for kind in kinds_of if issubclass(kind, WrappedTensor)]
    return list(dict.fromkeys(layer._device for kind in wrapped for layer in kind._layers))


def _acquire(ipu_id: int | None, holder: object) -> None:
    """Reserve IPUs for `holder`, as executors that ask for IPUs by number have them only in turn.

    Without a number any will do, and there are always enough.

    Raises:
        poptorch.Error: another executor has them, and POPTORCH_WAIT_FOR_IPU is not set.
    """
    if ipu_id is None:
        return
    while _holders.setdefault(ipu_id, holder) is not holder:
        if os.environ.get(_WAIT, "0") in ("", "0"):
            raise createPoptorchError(
                f"Failed to acquire the IPUs with id {ipu_id}: another executor has them. Call "
                f"detachFromDevice() on it, or set {_WAIT}=1",
                id="device",
            )
        time.sleep(_POLL_SECONDS)


def _release(ipu_id: int | None, holder: object) -> None:
    """Give the IPUs back; no-op for who does not have them."""
    if ipu_id is not None and _holders.get(ipu_id) is holder:
        del _holders[ipu_id]
