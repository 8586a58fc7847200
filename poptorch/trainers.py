"""Follow the executors that train tensors of a model on devices of their own."""

import weakref
from typing import Any

from torch import nn

from ipu_dynamo.capture.own_tensors import own_slots
from poptorch.ownership import Following, WeightsOnDevice
from poptorch.wrapping import WrappedTensor, Wrapping


class Trainers:
    """Who trains the tensors of a model, or of modules around or inside it.

    Invariant: `_followed` has the version of each trainer's weights up to which changes are here,
    or marked as what this executor's device has to get.

    Args:
        model: the module, or one that shares its tensors; any other callable has no trainers.
        own: the weights of the executor that asks.
    """

    def __init__(self, model: Any, own: WeightsOnDevice) -> None:
        self._model, self._own = model, own
        self._followed: dict[WeightsOnDevice, int] = {}
        self._wrappings = -1
        _all[id(self)] = self

    def fetch(self) -> dict[WeightsOnDevice, int]:
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
        news = {w: w.version for w, seen in list(self._followed.items()) if w.version != seen}
        for weights in news:
            if (owner := weights.owner) is not None:
                owner.copyWeightsToHostIfNeeded()
        return news

    def look(self) -> None:
        """Note who trains tensors of the model."""
        for weights in trainers_of(self._model):
            if weights is not self._own:
                self._followed.setdefault(weights, 0)

    def changed(self, news: dict[WeightsOnDevice, int]) -> frozenset[int]:
        """The ids of the host's tensors that have got new values by that which is news."""
        followed = self._followed  # one that another thread has taken out has nothing new
        changed = (w.changed_since(followed.get(w, w.version)) for w in news)
        return frozenset().union(*changed)

    def followed(self) -> Following:
        """What a compilation runs in, which must not wait for those who train.

        Under the lock of compiling nobody else begins to train.
        """
        self.look()
        return Following(list(self._followed))

    def follow(self, news: dict[WeightsOnDevice, int]) -> None:
        """Note that news have been taken over."""
        self._followed.update(news)


_all: "weakref.WeakValueDictionary[int, Trainers]" = weakref.WeakValueDictionary()


def note_trainers() -> None:
    """Let everybody note who trains, before somebody stops and cannot be found any more."""
    for reference in _all.valuerefs():  # a list made at once, whatever other threads add
        if (trainers := reference()) is not None:
            trainers.look()


def trainers_of(model: Any) -> list[WeightsOnDevice]:
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
