"""Check numbers that a compiled model reads from tensors: as places, and as results."""

import pytest
import torch
from torch.nn import functional as F

import ipu_dynamo
from ipu_dynamo import CompileError
from ipu_dynamo.torch_compile.backend import ipu

X = torch.arange(15.0).reshape(5, 3)


def compiled(function, **options):
    return torch.compile(
        function, backend=ipu, fullgraph=True, options={"engine": "eager", **options}
    )


def test_returns_numbers_beside_tensors():
    def run(x):
        return x.argmax().item(), x * 2, (x > 0).all().item(), x.sum().item(), x.argmin().item() + 1

    call = compiled(run)
    for x in (torch.tensor([0.5, 3.0, 1.0]), torch.tensor([-2.0, 0.25, -1.0], requires_grad=True)):
        found, expected = call(x), run(x)
        assert [type(value) for value in found] == [type(value) for value in expected]
        assert [found[i] for i in (0, 2, 3, 4)] == [expected[i] for i in (0, 2, 3, 4)]
        torch.testing.assert_close(found[1], expected[1])
    assert len(ipu_dynamo.programs()) == 3, "one graph each, without and with gradients"


@pytest.mark.few(3)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("trained", [False, True])
def test_cuts_at_places_that_are_values(dim, trained):
    def run(x, start):
        return (x.narrow(dim, start, 2) * x.select(dim, start.item()).unsqueeze(dim)).tanh()

    call = compiled(run)
    for start in (1, 0, -2, -3):
        ours, theirs = (X.clone().requires_grad_(trained) for _ in range(2))
        found, expected = call(ours, torch.tensor(start)), run(theirs, torch.tensor(start))
        torch.testing.assert_close(found, expected)
        if trained:
            found.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("start", [4, -6])
def test_a_place_outside_of_the_tensor_is_an_error(start):
    call = compiled(lambda x, start: x.narrow(0, start, 2) + 1)
    torch.testing.assert_close(call(X, torch.tensor(1)), X[1:3] + 1)
    with pytest.raises(Exception, match=r"exceeds dimension|out of range"):
        call(X, torch.tensor(start))


@pytest.mark.parametrize("trained", [False, True])
def test_a_cut_that_is_returned_shares_memory(trained):
    call = compiled(lambda x, start: x.narrow(0, start, 2))
    for start in (1, 2):
        x = X.clone().requires_grad_(trained)
        found = call(x, torch.tensor(start))
        torch.testing.assert_close(found, X[start : start + 2])
        if trained:
            found.sum().backward()
            assert x.grad.sum(1).tolist() == [3.0 * (start <= i < start + 2) for i in range(5)]
        else:
            found.zero_()
            assert x.sum(1).tolist() == [X[i].sum() * (i - start not in (0, 1)) for i in range(5)]


def test_writes_at_a_place_that_is_a_value():
    def run(x, start):
        y = x * 1
        y.narrow(1, start, 2).mul_(3)
        return y.tanh()

    call = compiled(run)
    for start in (0, 1):
        torch.testing.assert_close(call(X, torch.tensor(start)), run(X, torch.tensor(start)))
    with pytest.raises(CompileError, match="depends on the values of a tensor"):
        compiled(run)(X.clone().requires_grad_(), torch.tensor(1))


def test_a_gradient_may_be_a_cut():
    def run(x, part, start):
        return x.select_scatter(part, 0, start.item())

    call = compiled(run)
    for start in (0, 2):
        pairs = []
        for forward in (call, run):
            x, part = X.clone().requires_grad_(), torch.ones(3, requires_grad=True)
            (forward(x, part, torch.tensor(start)) * X).sum().backward()
            pairs.append((x.grad, part.grad))
        torch.testing.assert_close(*pairs)


def test_a_view_of_a_cut_is_not_returned():
    with pytest.raises(CompileError, match="depends on the values of a tensor"):
        compiled(lambda x, start: x.narrow(0, start, 2).t())(X, torch.tensor(1))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("tensors", [False, True])
def test_ctc_losses_compute_what_pytorch_does(reduction, tensors):
    def run(scores, targets, *lengths):
        of_inputs, of_targets = lengths if tensors else ((6, 4), (3, 2))
        probabilities = scores.log_softmax(2)
        return F.ctc_loss(probabilities, targets, of_inputs, of_targets, reduction=reduction)

    torch.manual_seed(0)
    scores, targets = torch.randn(6, 2, 5), torch.randint(1, 5, (2, 3))
    lengths = torch.tensor([6, 4]), torch.tensor([3, 2])
    ours, theirs = (scores.clone().requires_grad_() for _ in range(2))
    found, expected = compiled(run)(ours, targets, *lengths), run(theirs, targets, *lengths)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(ipu_dynamo.programs()) == 2


def test_numbers_and_cuts_of_a_cut_batch_are_those_of_the_whole():
    layer = torch.nn.Linear(3, 4)

    def run(x, start):
        return layer(x), x.argmax().item(), (x > 0).sum().item(), x.narrow(0, start, 2)

    x = torch.randn(6, 3)
    found = compiled(run, micro_batches=2)(x, torch.tensor(3))
    expected = run(x, torch.tensor(3))
    assert found[1:3] == expected[1:3]
    torch.testing.assert_close((found[0], found[3]), (expected[0], expected[3]))
