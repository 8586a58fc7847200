"""Check rules of micro-batches with PyTorch's own operator database: right numbers, or refused."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import ipu_dynamo
from ipu_dynamo.torch_compile.backend import ipu
from tests.torch_compile.database import SampleInput, database

SAMPLES = 4  # of each operator, the first that have a batch
ABSENT = ("jiterator", "empty")  # needs a GPU; has no values
QUICK = {
    "addmm", "bmm", "cat", "gather", "matmul", "mean", "nn.functional.cross_entropy",
    "nn.functional.mse_loss", "sort", "squeeze", "sum", "where",
}  # fmt: skip
OPERATORS = [
    pytest.param(op, marks=[] if op.name in QUICK else pytest.mark.slow, id=op.formatted_name)
    for op in database.op_db
    if torch.float64 in op.supported_dtypes("cpu")
    and not any(word in op.name for word in ABSENT)
    and op.variant_test_name != "batch_norm"
]


def tensors(tree) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def run(call, sample):
    """Results and gradients; gradients of all results, as far as they have any."""
    given = pytree.tree_map_only(
        Tensor,
        lambda t: t.detach().clone().requires_grad_(t.requires_grad),
        (sample.input, sample.args, sample.kwargs),
    )
    results = tensors(call(given[0], *given[1], **given[2]))
    wanted = [r for r in results if r.requires_grad]
    leaves = [t for t in tensors(given) if t.requires_grad]
    gradients = []
    if wanted and leaves:
        weights = [torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype).view(r.shape) for r in wanted]
        gradients = torch.autograd.grad(wanted, leaves, weights, allow_unused=True)
    return results, [
        torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=False)
    ]


def splits(op) -> Iterator[tuple[SampleInput, int]]:
    """Samples, and a number of micro-batches that divides the rows of most of their tensors."""
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd):
        given = tensors((sample.input, sample.args, sample.kwargs))
        rows = [t.shape[0] for t in given if t.dim()]
        most = max(set(rows), key=rows.count, default=0)
        if most > 1:
            yield sample, next(n for n in (2, 3, 5, most) if most % n == 0)


def seeded(call, sample, seed):
    torch.manual_seed(seed)
    return run(call, sample)


def same(a, b) -> bool:
    try:
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


@pytest.mark.few(4)
@pytest.mark.parametrize("op", OPERATORS)
def test_right_or_refused(op):
    for sample, n in islice(splits(op), SAMPLES):
        try:
            expected = seeded(op.op, sample, 0)
        except RuntimeError:
            continue  # PyTorch alone does not do it
        if not same(expected, seeded(op.op, sample, 1)):
            continue  # numbers drawn for a batch are not those drawn for its parts
        torch._dynamo.reset()
        options = {"engine": "eager", "micro_batches": n}
        call = torch.compile(op.op, backend=ipu, fullgraph=True, options=options)
        try:
            found = run(call, sample)
        except (ipu_dynamo.IpuError, torch._dynamo.exc.TorchDynamoException) as error:
            refusal = str(error)
        else:
            refusal = ""
            torch.testing.assert_close(found, expected, equal_nan=True)
        assert "not expected" not in refusal
