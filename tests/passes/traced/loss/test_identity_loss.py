"""Check which value training minimises."""

import pytest
import torch
import torch.nn.functional as F

from ipu_dynamo import CompileError, identity_loss
from ipu_dynamo.capture.trace import read_arguments, trace
from ipu_dynamo.passes.traced.loss.identity_loss import LOSSES, IdentityLoss

X, Y = torch.rand(4, 3), torch.rand(4, 3)
LABELS = torch.tensor([0, 2, 1, 0])
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])


def captured(model, *args):
    return trace(model, read_arguments(model, args, {}), training=True)


def loss_of(model, *args, output=None):
    """The node that training minimises, and the capture."""
    capture = captured(model, *args)
    assert IdentityLoss(output)(capture)
    return capture.loss, capture


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.l1_loss(x, Y),
        lambda x: F.mse_loss(x, Y, reduction="none"),
        lambda x: F.cross_entropy(x, LABELS),
        lambda x: F.nll_loss(x, LABELS, reduction="sum"),
        lambda x: F.nll_loss(x.view(1, 3, 4), LABELS[None]),
        lambda x: F.nll_loss(x.view(1, 3, 2, 2), LABELS.view(1, 2, 2)),
        lambda x: F.binary_cross_entropy(x, Y),
        lambda x: F.binary_cross_entropy_with_logits(x, Y),
        lambda x: F.kl_div(x, Y, reduction="batchmean"),
        lambda x: F.poisson_nll_loss(x, Y),
        lambda x: F.hinge_embedding_loss(x[:, 0], SIGNS),
        lambda x: F.smooth_l1_loss(x, Y),
        lambda x: F.soft_margin_loss(x[:, 0], SIGNS),
        lambda x: F.cosine_embedding_loss(x, Y, SIGNS),
        lambda x: F.margin_ranking_loss(x[:, 0], Y[:, 0], SIGNS),
        lambda x: F.triplet_margin_loss(x, Y, Y + 1),
        lambda x: F.ctc_loss(x.log_softmax(1), LABELS[None, 1:2] + 1, (4,), (1,)),
    ],
)
@pytest.mark.filterwarnings("ignore:the tensor")
def test_torch_losses_are_marked(loss):
    node, _ = loss_of(loss, X)
    assert node.target in LOSSES


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_identity_loss_marks_any_value(reduction):
    node, _ = loss_of(lambda x: (identity_loss(x * 2, reduction), x), X)
    assert node.args == (node.all_input_nodes[0], reduction)


def test_loss_need_not_be_returned():
    def model(x, y):
        F.mse_loss(x, y)
        return x

    node, capture = loss_of(model, X, Y)
    assert node.target is torch.ops.aten.mse_loss.default
    assert node not in capture.returned


def test_marked_value_that_feeds_another_is_no_loss():
    def model(x, y):
        return identity_loss(F.mse_loss(x, y) + F.l1_loss(x, y), "none")

    node, _ = loss_of(model, X, Y)
    assert node.target is torch.ops.ipu.identity_loss.default


def test_loss_feeds_another_also_through_a_change_in_place():
    def model(x, y):
        total = torch.zeros(())
        total += F.mse_loss(x, y)
        return identity_loss(total, "none")

    node, _ = loss_of(model, X, Y)
    assert node.target is torch.ops.ipu.identity_loss.default


def test_factor_after_a_torch_loss_is_not_differentiated():
    with pytest.warns(UserWarning, match=r"minimises %mse_loss .*, and not the returned %mul "):
        node, _ = loss_of(lambda x, y: F.mse_loss(x, y) * 100, X, Y)
    assert node.target is torch.ops.aten.mse_loss.default


class Scaled(torch.nn.Module):
    """A model whose result is made of a loss by `then`, with a parameter of its own."""

    def __init__(self, then):
        super().__init__()
        self.scale, self.then = torch.nn.Parameter(torch.ones(3)), then

    def forward(self, x, y):
        return self.then(self, F.mse_loss(x * self.scale, y, reduction="none"))


@pytest.mark.parametrize(
    "then",
    [
        lambda m, loss: (loss * (loss > 0)).sum() / loss.numel(),
        lambda m, loss: loss.mean(),
        lambda m, loss: (loss, loss.mean() + m.scale.square().sum()),
        lambda m, loss: (loss.detach(), (loss * m.scale).sum()),
    ],
)
def test_a_result_past_the_loss_is_told_with_its_line(then):
    with pytest.warns(UserWarning, match=r"test_identity_loss.py:\d+[\s\S]*identity_loss\(value"):
        loss_of(Scaled(then), X, Y)


@pytest.mark.parametrize(
    "then",
    [
        lambda m, loss: loss,
        lambda m, loss: loss.half().view(-1),
        lambda m, loss: (loss, loss.mean().exp()),
        lambda m, loss: loss.detach().mean() + m.scale.sum(),
        lambda m, loss: (loss > 0).sum(),
        lambda m, loss: m.scale.sum(),
    ],
)
def test_other_results_beside_the_loss_are_not_told(then, recwarn):
    loss_of(Scaled(then), X, Y)
    assert not recwarn.list


def test_a_named_loss_is_meant(recwarn):
    loss_of(Scaled(lambda m, loss: (loss.mean(), loss.mean() * 2)), X, Y, output=0)
    assert not recwarn.list


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: torch.nn.KLDivLoss(reduction="batchmean")(x, Y),
        lambda x: F.kl_div(x, Y, None, None, "batchmean"),
        lambda x: F.mse_loss(x, Y, weight=Y),
        lambda x: F.mse_loss(x, Y, reduction="sum", weight=Y),
        lambda x: F.mse_loss(x, Y, reduction="none", weight=Y),
    ],
)
def test_the_value_of_a_loss_of_several_operators_is_the_loss(loss):
    _, capture = loss_of(loss, X)
    (returned,) = capture.returned
    assert returned is capture.loss


def test_metric_under_no_grad_counts_as_a_loss():
    def model(x, y):
        with torch.no_grad():
            metric = F.l1_loss(x, y)
        return F.mse_loss(x, y), metric

    with pytest.raises(CompileError, match="Multiple independent losses"):
        loss_of(model, X, Y)


def test_two_losses_are_refused_with_names_and_line():
    def model(x, y):
        first = F.mse_loss(x, y)
        return first + F.l1_loss(x, y)

    message = r"Multiple independent losses found[\s\S]*%mse_loss, %l1_loss[\s\S]*F.l1_loss\(x, y\)"
    with pytest.raises(CompileError, match=message):
        loss_of(model, X, Y)


def test_model_without_a_loss_is_refused():
    with pytest.raises(CompileError, match=r"Couldn't find a loss[\s\S]*identity_loss"):
        loss_of(lambda x, y: ((x - y) ** 2).sum(), X, Y)


def test_returned_tensor_can_be_named_as_the_loss():
    def model(x, y):
        return {"name": "n", "values": [x, ((x - y) ** 2).sum()]}, F.mse_loss(x, y)

    node, capture = loss_of(model, X, Y, output=1)
    assert node is capture.returned[1]
    assert node.target is torch.ops.aten.sum.default


@pytest.mark.parametrize("output", [2, -1])
def test_named_loss_must_exist(output):
    with pytest.raises(CompileError, match=f"output {output}, but the model returns 2 tensors"):
        loss_of(lambda x, y: (x, y), X, Y, output=output)


def test_second_run_and_inference_change_nothing():
    _, capture = loss_of(F.mse_loss, X, Y)
    assert not IdentityLoss()(capture)
    inference = trace(F.mse_loss, read_arguments(F.mse_loss, (X, Y), {}), training=False)
    assert not IdentityLoss()(inference)


def test_identity_loss_outside_a_trace_is_its_reduction():
    assert torch.equal(identity_loss(X, "sum"), X.sum())
    assert torch.equal(identity_loss(X, "mean"), X.mean())
    copy = identity_loss(X, "none")
    assert torch.equal(copy, X)
    assert copy is not X
    with pytest.raises(AssertionError, match="Unsupported reduction type"):
        identity_loss(X, "max")
