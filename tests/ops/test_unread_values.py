"""Check operators that decide by values in PyTorch's own code, and losses that do."""

import pytest
import torch
from torch.nn import functional as F

import ipu_dynamo
from ipu_dynamo import Options
from ipu_dynamo.torch_compile.backend import ipu

X = torch.tensor([[0.5, 1.5, -2.0, 0.25], [1.0, 3.0, 0.5, -0.75], [2.0, 2.0, -1.0, 4.0]])
COUNTS = torch.tensor([1, 3, 0, 2])
WEIGHTS = torch.tensor([0.5, 1.5, 0.0, 2.0])


def covariances(x, counts, weights):
    return (
        torch.cov(x, correction=0),
        torch.cov(x, fweights=counts, aweights=weights),
        torch.cov(x[0], aweights=weights, correction=2),
        torch.corrcoef(x),
    )


def chosen(x, counts, weights):
    return [
        torch.combinations(counts, r, with_replacement)
        for r in range(5)
        for with_replacement in (False, True)
    ]


def losses_of_a_row(x, counts, weights):
    return [
        F.multilabel_margin_loss(x[0], labels, reduction=reduction)
        for reduction in ("none", "mean", "sum")
        for labels in (counts, torch.tensor([2, -1, 1, 0]))
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize("forward", [covariances, chosen, losses_of_a_row])
@pytest.mark.parametrize("whole", [True, False])
def test_computes_what_pytorch_does(forward, whole):
    if whole:
        compiled = ipu_dynamo.compile_inference(forward, Options(engine="eager"))
    else:
        compiled = torch.compile(forward, backend=ipu, fullgraph=True, options={"engine": "eager"})
    for ours, theirs in zip(compiled(X, COUNTS, WEIGHTS), forward(X, COUNTS, WEIGHTS), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        (lambda x: torch.cov(x, aweights=x[0]), "aweights cannot be negative"),
        (lambda x: F.gaussian_nll_loss(x, x, x), "var has negative"),
    ],
)
def test_a_value_that_pytorch_refuses_is_an_error_when_the_program_runs(forward, problem):
    compiled = ipu_dynamo.compile_inference(forward, Options(engine="eager"))
    torch.testing.assert_close(compiled(X.abs()), forward(X.abs()))
    with pytest.raises(Exception, match=problem):
        compiled(X)
