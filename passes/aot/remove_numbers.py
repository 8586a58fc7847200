"""Remove inputs that are numbers: they have no readers once sizes are fixed.

Before   %s: Sym[s] = input
         %y = aten.relu(%x: f32[n])
After    %y = aten.relu(%x)
         del %s
Keeps    all operators. The caller leaves the number out.
Source   programs take tensors only.
"""

from torch import Tensor

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.passes.kit import GraphPass


class RemoveNumbers(GraphPass):
    """The pass."""

    level = "joint"
    needed = "programs take tensors only"

    def rewrite(self, capture: Joint) -> bool:
        inputs = capture.placeholder_nodes
        numbers = [n for n in inputs if not isinstance(n.meta["val"], Tensor) and not n.users]
        capture.remove_inputs(numbers)
        return bool(numbers)
