"""Return each computed value once: the caller has arguments, numbers and repeated values itself.

Before   %y = aten.relu(%x: f32[n])
         return (%y, %x, %y)
After    %y = aten.relu(%x)
         return (%y,)
Keeps    every operator. `describe_call` says which result each returned value is.
Source   AOTAutograd, whose graphs return arguments for backward, and a value for each use.
"""

from ipu_dynamo.capture.capture import Joint, OutputRole
from ipu_dynamo.capture.dynamo import computed_results
from ipu_dynamo.passes.kit import GraphPass


class DropRepeatedResults(GraphPass):
    """The pass."""

    level = "joint"
    needed = "programs return each value once, and no argument"

    def rewrite(self, capture: Joint) -> bool:
        computed = computed_results(capture)
        roles = tuple(OutputRole("value", str(place)) for place in range(len(computed)))
        if (computed, roles) == (capture.returned, capture.outputs):
            return False
        capture.set_returned(computed, roles)
        return True
