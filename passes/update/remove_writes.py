"""Replace the writes of a recorded step by values.

Before   %p: parameter;   aten.add_(%p, %g);   return %p
After    %add = aten.add(%p, %g);   return %add
Keeps    what every result is. Views stay views: copies of them would take time.
Source   torch.func.functionalize.
"""

from ipu_dynamo.capture.private.update_symbols import recording, without_writes
from ipu_dynamo.capture.update.record_update import RecordedUpdate
from ipu_dynamo.capture.update.trace_step import RecordedStep, explained
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import writes
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update.step_graphs import each_step


def _remove(step: RecordedStep) -> bool:
    if not any(map(writes, step.graph.graph.nodes)):
        return False
    with recording(step.stand_ins):
        try:
            step.graph = without_writes(step.graph, step.values)
        except Exception as error:
            raise explained(error, step.world) from error
    graph = step.graph.graph
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        node.replace_all_uses_with(node.args[1])  # the last writes, to the inputs
        graph.erase_node(node)
    return True


class RemoveWrites(Pass):
    """The pass."""

    level = "recorded"
    needed = "functions of a program write nothing"

    def __call__(self, update: RecordedUpdate) -> bool:
        return each_step(update, _remove)
