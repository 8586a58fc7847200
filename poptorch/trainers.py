"""Follow the executors that train tensors of a model on devices of their own."""

from typing import Any

from torch import nn

from poptorch.wrapping import WeightLink, WrappedModule, WrappedTensor, Wrapping


class Trainers:
    """Who trains the tensors of a model, or of modules around or inside it.

    Invariant: `_seen` has the version of each trainer's weights that the host had last.

    Args:
        model: the module; any other callable has no trainers.
        but: the link of the executor that asks.
    """

    def __init__(self, model: Any, but: WeightLink) -> None:
        self._model, self._but = model, but
        self._seen: dict[WeightLink, int] = {}
        self._wrappings = -1

    def fetch(self) -> bool:
        """Bring the host's weights up to date; say whether they have been trained since."""
        if self._wrappings != Wrapping.installed:
            self._wrappings = Wrapping.installed
            for link in links_of(self._model):
                if link is not self._but:
                    self._seen.setdefault(link, 0)
        trained = [link for link, version in self._seen.items() if link.version != version]
        for link in trained:
            if (owner := link.owner) is not None:
                owner.copyWeightsToHostIfNeeded()
            self._seen[link] = link.version
        return bool(trained)


def links_of(model: Any) -> list[WeightLink]:
    """The links of a model and of its parameters and buffers, each once.

    A module inside a wrapped one is not wrapped itself: only its tensors show who trains it.
    """
    if not isinstance(model, nn.Module):
        return []
    tensors = [*model.parameters(), *model.buffers()]
    links = [tensor._link for tensor in tensors if isinstance(tensor, WrappedTensor)]
    if isinstance(model, WrappedModule):
        links.append(model._poptorch_link)
    return list(dict.fromkeys(links))
