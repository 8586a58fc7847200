"""Count the calls of modules in a forward pass: each begins a block, and a layer needs one."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ipu_dynamo import blocks
from ipu_dynamo.capture.private.tracing import is_fake, pytree

log = logging.getLogger(__name__)


class Calls:
    """Counts the calls of modules in one forward pass. The hook that begins the count."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.counts.clear()

    def next(self, name: str) -> int:
        """How often `name` has been called in this pass, with this call."""
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.counts[name]


class StartAtEachCall(blocks.BlockStart):
    """Begins another block at each call: a pipeline that comes back to an IPU goes on there."""

    def __init__(self, name: str, ipu: int, calls: Calls) -> None:
        super().__init__(name, ipu)
        self._calls = calls

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        call = self._calls.next(self.name)
        blocks.begin(self.name if call == 1 else f"{self.name}/{call}", self.ipu_id)


class WarnOfUncalled:
    """The hook behind a traced pass that names the layers which no call came to.

    A model that reads a layer's parts without calling the layer begins no block there.
    """

    def __init__(self, layers: Sequence[str], calls: Calls) -> None:
        self._layers, self._calls = layers, calls
        self._warned = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._warned or torch.compiler.is_dynamo_compiling():
            return
        uncalled = [name for name in self._layers if not self._calls.counts.get(name)]
        if uncalled and any(map(is_fake, pytree.tree_leaves(output))):
            self._warned = True
            log.warning(
                "%s does not call %s: they begin no block, and what it computes with them is on "
                "the IPU of the block before",
                type(module).__name__,
                ", ".join(uncalled),
            )
