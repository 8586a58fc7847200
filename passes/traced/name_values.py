"""Name the result of every operator by the module that calls it and by the operator.

Before   %y = aten.linear(%x: f32[m,k], %w: f32[n,k], %b: f32[n])  with meta["ipu.scope"] = "fc1"
After    the same
         %y  with meta["ipu.name"] = "fc1/Add:0" and meta["ipu.matmul_name"] = "fc1/MatMul:0"
Keeps    the graph. The number is that of the result; of equal names all but the first have another
         one behind it. Operators are called as in ONNX; a layer with a bias is two of them.
Source   PopTorch user guide, "poptorch.Options.anchorTensor" and "poptorch.NameScope".
"""

import re
from collections import Counter
from operator import getitem

from torch import Tensor, fx

from ipu_dynamo.capture.capture import MATMUL_NAME, NAME, Traced
from ipu_dynamo.capture.scopes import SCOPE
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.kit import Pass

_ONNX = {  # names that are not the operator's own in capitals
    "_to_copy": "Cast",
    "avg_pool": "AveragePool",
    "batch_norm": "BatchNormalization",
    "bmm": "MatMul",
    "cat": "Concat",
    "convolution": "Conv",
    "conv_transpose": "ConvTranspose",
    "embedding": "Gather",
    "flatten": "Reshape",
    "group_norm": "GroupNormalization",
    "index_select": "Gather",
    "instance_norm": "InstanceNormalization",
    "layer_norm": "LayerNormalization",
    "linear": "MatMul",
    "matmul": "MatMul",
    "mean": "ReduceMean",
    "mm": "MatMul",
    "permute": "Transpose",
    "reshape": "Reshape",
    "select": "Slice",
    "sum": "ReduceSum",
    "t": "Transpose",
    "to": "Cast",
    "unflatten": "Reshape",
    "view": "Reshape",
}


class NameValues(Pass):
    """The pass."""

    level = "traced"
    needed = "values are found by name"

    def __call__(self, capture: Traced) -> bool:
        names = plan(capture.graph.graph)
        new = [(node, key, name) for node, key, name in names if node.meta.get(key) != name]
        for node, key, name in new:
            node.meta[key] = name
        return bool(new)


def plan(graph: fx.Graph) -> list[tuple[fx.Node, str, str]]:
    """For each value that a user's operator makes, the key of its name, and the name."""
    counts: Counter[str] = Counter()

    def unique(node: fx.Node, operator: str, index: int = 0) -> str:
        scope = node.meta[SCOPE]
        name = f"{scope}/{operator}:{index}" if scope else f"{operator}:{index}"
        counts[name] += 1
        return name if counts[name] == 1 else f"{name}/{counts[name] - 1}"

    names = []
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta["val"], Tensor):
            continue
        if node.target is getitem:
            source, index = node.args
            names.append((node, NAME, unique(node, onnx_name(source), index)))
        elif has_bias(node):
            names.append((node, MATMUL_NAME, unique(node, "MatMul")))
            names.append((node, NAME, unique(node, "Add")))
        else:
            names.append((node, NAME, unique(node, onnx_name(node))))
    return names


def has_bias(node: fx.Node) -> bool:
    """Whether a node is a linear layer that adds a bias."""
    return node.target is aten.linear.default and len(node.args) > 2 and node.args[2] is not None


def onnx_name(node: fx.Node) -> str:
    """Return ONNX's name of an operator, or a name in its style."""
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0].rstrip("_")
    plain = re.sub("[123]d$", "", name)  # of as many dimensions
    if plain in _ONNX:
        return _ONNX[plain]
    return "".join(word.capitalize() for word in plain.split("_"))
