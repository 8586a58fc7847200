"""Name the strings that PyTorch's internals write into graphs. Checked on 2.13.0."""

from typing import Any

from torch import fx

# Keys of node.meta
CUSTOM = "custom"  # what users annotate: AOTAutograd copies it to every node that it makes
DESC = "desc"  # the input or result of a user's function that a node of AOTAutograd's graph is
EXAMPLE_VALUE = "example_value"  # of Dynamo's graph: the fake value
FROM_NODE = "from_node"  # the nodes of earlier graphs that a node was made of
IS_GRADIENT_SUM = "is_gradient_acc"  # autograd adds gradients of several uses of a value
MODULE_STACK = "nn_module_stack"  # the modules whose forward calls the operator
POLICY = "recompute"  # partitioners look for a CheckpointPolicy there
SEQ_NR = "seq_nr"  # an operator and its backward have the same number
TAG = "partitioner_tag"  # partitioners look for the direction there
TORCH_FN = "torch_fn"  # the function of PyTorch that the operator comes from

# Values at TAG
FORWARD_TAG = "is_forward"  # a value of the forward pass
BACKWARD_TAG = "is_backward"  # a value of the backward pass
ONLY_BACKWARD_TAG = "must_be_in_backward"  # partitioners keep the value out of forward

# Other words
GRADIENT_SUM = "Gradient addition node"  # after the source line of a sum of gradients
INPUTS = "primals_"  # AOTAutograd's names of the inputs of a joint graph begin so
TANGENTS = "tangents_"  # its names of the gradients of results begin so

# Keys of node.meta that do not change the computation, or only repeat other facts of the node
NOTES = frozenset(
    {
        "eager_input_vals",
        FROM_NODE,
        MODULE_STACK,
        "original_aten",
        SEQ_NR,
        "source_fn_stack",
        "stack_trace",
        "tensor_meta",
        TORCH_FN,
        "unbacked_bindings",
        "val",
    }
)


def annotation(node: fx.Node, key: str) -> Any:
    """Return the value that a node, or the node that it was made from, was given by `annotate`."""
    return (node.meta.get(CUSTOM) or {}).get(key)


def annotate(node: fx.Node, key: str, value: object) -> None:
    """Give a node a value that AOTAutograd copies to every node that it makes from it."""
    node.meta[CUSTOM] = {**(node.meta.get(CUSTOM) or {}), key: value}


def direction_tag(backward: bool) -> str:
    """Return the value at `TAG` of a direction."""
    return BACKWARD_TAG if backward else FORWARD_TAG
