"""Compute products of matrices, with addends."""

import torch
from torch import Tensor

from ipu_dynamo.saved_model.tf_graphs.operators.registry import Call, operator


@operator("MatMul")
def matmul(call: Call) -> Tensor:
    a, b = call.tensor(0), call.tensor(1)
    a = a.t() if call.attr("transpose_a") else a
    b = b.t() if call.attr("transpose_b") else b
    return torch.mm(a, b)


@operator("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(call: Call) -> Tensor:
    a, b = call.tensor(0), call.tensor(1)
    a = a.transpose(-1, -2) if call.attr("adj_x") else a
    b = b.transpose(-1, -2) if call.attr("adj_y") else b
    return torch.matmul(a, b)


@operator("Einsum")
def einsum(call: Call) -> Tensor:
    return torch.einsum(call.attr("equation"), *call.tensors())


@operator("BiasAdd")
def bias_add(call: Call) -> Tensor:
    x, bias = call.tensor(0), call.tensor(1)
    if call.attr("data_format", "NHWC") == "NCHW":
        bias = bias.reshape(-1, *[1] * (x.dim() - 2))
    return x + bias
