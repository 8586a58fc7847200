"""Remove inputs that are numbers, which nobody reads once sizes are fixed.

Before   %s: Sym[s] = input
         %y = aten.relu(%x: f32[n])
After    %y = aten.relu(%x)
         del %s
Keeps    all operators. The caller leaves the number out.
Source   programs take tensors only.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.passes.levels import Level


@dataclass(frozen=True)
class RemoveNumbers:
    """The pass."""

    name: ClassVar[str] = "RemoveNumbers"
    level: ClassVar[Level] = "joint"
    needed: ClassVar[str] = "programs take tensors only"

    def __call__(self, capture: Joint) -> bool:
        inputs = capture.placeholder_nodes
        numbers = [n for n in inputs if not isinstance(n.meta["val"], Tensor) and not n.users]
        capture.remove_inputs(numbers)
        if numbers:
            capture.graph.recompile()
        return bool(numbers)
