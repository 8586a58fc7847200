"""Find the rule that says what an operator does to the rows of micro-batches.

Source: PyTorch's documentation of each operator; the idea is that of sharding propagation.
"""

from functools import partial
from typing import Any

import torch

from ipu_dynamo.passes.micro_batch import batch_layers as layers
from ipu_dynamo.passes.micro_batch import batch_shapes as shapes
from ipu_dynamo.passes.micro_batch.batch_placements import (
    Answer,
    Placement,
    Question,
    Rows,
    Rule,
    elementwise,
)

aten = torch.ops.aten
LOSSES = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
}
LOSS_GRADIENTS = {
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
}
NLL = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
BATCH_NORMS = {aten._native_batch_norm_legit_functional.default}
_ELEMENTWISE = (
    "_to_copy copy native_dropout bernoulli.p bernoulli rand_like randn_like hardtanh_backward "
    "leaky_relu_backward elu_backward fill.Scalar lift_fresh_copy detach alias "
    "log_sigmoid_forward log_sigmoid_backward hardsigmoid_backward hardswish_backward "
    "softplus_backward"
)
_TABLE: dict[Rule, str] = {
    elementwise: _ELEMENTWISE,
    shapes.like: "zeros_like ones_like full_like empty_like",
    shapes.view: "view _unsafe_view reshape",
    shapes.expand: "expand",
    shapes.permute: "permute",
    shapes.transpose: "t transpose.int",
    shapes.unsqueeze: "unsqueeze",
    shapes.squeeze: "squeeze squeeze.dim squeeze.dims",
    shapes.slice_: "slice.Tensor",
    shapes.select: "select.int unbind.int",
    shapes.except_along(2): "split.Tensor split_with_sizes",
    shapes.except_along(1): "cumsum cumprod _softmax _log_softmax",
    shapes.except_along(1, -1): "glu sort argsort",
    shapes.except_along(2, -1): "topk",
    shapes.sort: "sort.stable",
    layers.row_by_last: "_softmax_backward_data _log_softmax_backward_data",
    shapes.flip: "flip",
    shapes.cat: "cat",
    shapes.stack: "stack",
    shapes.reduce: (
        "sum sum.dim_IntList mean mean.dim amax amin any.dim any.dims all.dim all.dims argmax "
        "argmin prod.dim_int var.correction std.correction logsumexp max.dim min.dim"
    ),
    layers.product: "mm bmm",
    layers.product_and_sum: "addmm baddbmm",
    layers.embedding: "embedding",
    layers.embedding_backward: "embedding_dense_backward",
    layers.layer_norm: "native_layer_norm",
    layers.layer_norm_backward: "native_layer_norm_backward",
    layers.row_by_row((0,), "rrr", size=3): "native_group_norm",
    layers.row_by_row((0, 1, 2, 3), "rss", size=5): "native_group_norm_backward",
    layers.row_by_row((0,), "r"): (
        "convolution avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d"
    ),
    layers.row_by_row((0,), "rr"): "max_pool2d_with_indices",
    layers.row_by_row((0, 1), "rss"): "convolution_backward",
    layers.row_by_row((0, 1), "r"): "avg_pool2d_backward _adaptive_avg_pool2d_backward",
    layers.row_by_row((0, 1, 7), "r"): "max_pool2d_with_indices_backward",
    layers.batch_norm: "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training",
    layers.batch_norm_backward: "native_batch_norm_backward",
    layers.attention(3, 2): "_scaled_dot_product_flash_attention_for_cpu",
    layers.attention(6, 3): "_scaled_dot_product_flash_attention_for_cpu_backward",
    shapes.gather: "gather scatter.src scatter_add",
    shapes.select_backward: "select_backward",
    shapes.slice_backward: "slice_backward",
    shapes.pad: "constant_pad_nd",
    shapes.triangle: "tril triu",
    layers.nll: "nll_loss_forward nll_loss2d_forward",
    layers.nll_backward: "nll_loss_backward nll_loss2d_backward",
    layers.loss: "mse_loss smooth_l1_loss huber_loss binary_cross_entropy",
    layers.loss_backward: (
        "mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
        "binary_cross_entropy_backward"
    ),
}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


_RULES: dict[object, Rule] = {
    _overload(name): rule for rule, names in _TABLE.items() for name in names.split()
}


def answer(q: Question) -> Answer | None:
    """How the operator runs on a micro-batch, or None where rows meet or no rule is known."""
    target = q.node.target
    rows = [placed for s in q.node.all_input_nodes if isinstance(placed := q.at[s], Rows)]
    repetitions = {placed.outer for placed in rows}
    if len(repetitions) > 1 or ("dim" in q.node.kwargs and target is not aten.sort.stable):
        return None
    pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    rule = _RULES.get(target, elementwise if pointwise else None)
    found = rule(q) if rule is not None else None
    if found is None or rule is shapes.view or repetitions in (set(), {1}):
        return found
    (found.outer,) = repetitions
    results = found.results
    repeated = partial(_repeated, outer=found.outer)
    found.results = (
        tuple(map(repeated, results)) if isinstance(results, tuple) else repeated(results)
    )
    return found


def _repeated(placement: Placement, outer: int) -> Placement:
    return Rows(placement.dim, outer) if isinstance(placement, Rows) else placement
