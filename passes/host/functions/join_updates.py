"""Let the function of a traced update take many parameters, whose elements are in one row.

Before   (%weight', %state') = @piece(%weight: f32[4,3], %gradient, %state, %factor)
After    the same for f32[1200], of a hundred such parameters
Keeps    what each element becomes, up to the rounding of other vector instructions: only functions
         that compute element by element are joined. For small parameters copies take less time
         than calls.
Source   torch.optim, which updates lists of tensors (`foreach`).
"""

import torch
from torch import fx
from torch.fx.node import map_arg

from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update.step_graphs import is_elementwise
from ipu_dynamo.program import Function, graph_outputs, make_function


def can_join(function: Function) -> bool:
    """Whether a function computes element by element.

    Args:
        function: takes a weight first. All other inputs are numbers, or the parameter's own tensors
            in the weight's shape. The caller leaves out parameters that share a tensor: a row would
            need it once for each.
    """
    weight = function.inputs[0]
    shape = weight.shape if weight is not None else ()
    types = [t for t in (*function.inputs, *function.outputs) if t is not None]
    if not shape or any(type_.shape not in ((), shape) for type_ in types):
        return False
    size = torch.Size(shape)
    return all(is_elementwise(node, size) for node in function.operators)


def _joined(function: Function, elements: int) -> Function:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    with torch.no_grad():
        for node in function.graph.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["val"]
                copies[node] = graph.placeholder(node.name)
                value = value.new_empty(elements) if value.dim() else value
            elif node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                args, kwargs = map_arg(
                    (copies[node].args, copies[node].kwargs), lambda n: n.meta["val"]
                )
                value = node.target(*args, **kwargs)
            else:
                continue
            copies[node].meta["val"] = value
    graph.output(tuple(copies[node] for node in graph_outputs(function.graph)))
    return make_function(f"{function.name}_joined", fx.GraphModule(torch.nn.Module(), graph))


class JoinUpdates(Pass):
    """The pass.

    Args:
        elements: of parameters that are updated together, in a row.
    """

    level = "function"
    needed = "parameters in a row have another shape"

    elements: int

    def __call__(self, function: Function) -> Function:
        return _joined(function, self.elements)
