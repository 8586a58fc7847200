"""Check `poptorch.dynamic_slice` and `poptorch.dynamic_update`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import poptorch


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "eager")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"showCompilationProgressBar": false}')


X = torch.arange(24.0).reshape(2, 6, 2)


def ring(tensor, dim, start, size, step=1):
    """The window, taken from the tensor twice in a row."""
    twice = torch.cat([tensor, tensor], dim)
    return twice.transpose(0, dim)[start : start + size : step].transpose(0, dim)


@pytest.mark.examples(6)
@given(st.sampled_from([(1, 6), (-2, 3), (1, 2), (0, 2)]), st.integers(1, 4), st.data())
def test_a_window_wraps_around_and_moves_without_compiling_again(shape, step, data):
    dim, size = shape
    model = poptorch.inferenceModel(
        lambda x, start: poptorch.dynamic_slice(x, dim, start, size, step)
    )
    starts = range(X.shape[dim])
    for start in data.draw(st.lists(st.sampled_from(starts), min_size=1, max_size=3)):
        result = model(X, torch.tensor([start]))
        assert torch.equal(result, ring(X, dim % 3, start, size, step))


@pytest.mark.parametrize("start", [0, 4, 5])
def test_a_window_is_updated_in_a_copy(start):
    new = -torch.ones(2, 3, 2)

    def forward(x, src, start):
        return poptorch.dynamic_update(x, src, 1, start, 3), x

    result, same = poptorch.inferenceModel(forward)(X, new, torch.tensor([start], dtype=torch.int))
    expected = X.clone()
    expected[:, [(start + i) % 6 for i in range(3)]] = -1
    assert torch.equal(result, expected)
    assert torch.equal(same, X)


def test_gradients_go_into_the_window():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1, 4))
            self.v = torch.nn.Parameter(torch.ones(1, 2))

        def forward(self, start):
            updated = poptorch.dynamic_update(self.w, self.v, 1, start, 2)
            weights = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
            part = poptorch.dynamic_slice(self.w, 1, start, 2, 1)
            return poptorch.identity_loss((updated * weights).sum() + 10 * part.sum(), "sum")

    model = Model()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    poptorch.trainingModel(model, None, optimizer)(torch.tensor([3]))
    torch.testing.assert_close(model.w.detach(), 1 - torch.tensor([[10.0, 2.0, 3.0, 10.0]]))
    torch.testing.assert_close(model.v.detach(), 1 - torch.tensor([[4.0, 1.0]]))


def test_outside_a_model_it_is_an_ordinary_slice():
    assert torch.equal(poptorch.dynamic_slice(X, 1, 2, 4, 3), X[:, 2:6:3])
    assert torch.equal(poptorch.dynamic_slice(X, 1, torch.tensor([4]), 3, 1), X[:, 4:])
    updated = poptorch.dynamic_update(X, torch.zeros(2, 2, 2), 1, 1, 2)
    expected = X.clone()
    expected[:, 1:3] = 0
    assert torch.equal(updated, expected)


START = torch.tensor([1])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1.0], 0, START, 1, 1), "tensor must be a torch.tensor"),
        ((X, 1, 1, 3, 1), "start must be a torch.tensor"),
        ((X, 1, torch.tensor([1, 2]), 3, 1), "integer tensor with one element"),
        ((X, 1, torch.tensor([1.0]), 3, 1), "integer tensor with one element"),
        ((X, 1.0, START, 3, 1), "Dimension must be an integer."),
        ((X, 1, START, 3.0, 1), "Size must be an integer."),
        ((X, 1, START, 3, START), "Step must be an integer."),
        ((X, 1, START, 0, 1), "The start and end of a slice must be different."),
        ((X, 1, START, -1, 1), "with the end less than the start is not supported."),
        ((X, 1, START, 3, 0), "step of a slice must be at least 1"),
        ((X, 1, START, 4, 1), r"slice \(4\) must be a factor of the slicing dimension \(6\)"),
        ((X, 3, START, 1, 1), "has no dimension 3"),
    ],
)
def test_wrong_arguments_of_a_slice_are_refused(arguments, text):
    model = poptorch.inferenceModel(lambda x: x + poptorch.dynamic_slice(*arguments).sum())
    with pytest.raises(poptorch.Error, match=text):
        model(torch.ones(1))


@pytest.mark.parametrize(
    ("src", "size", "text"),
    [
        (X[0], 3, "the same rank and dtype"),
        (X.half(), 6, "the same rank and dtype"),
        (X, 3, "src has size 6 in dimension 1, not 3"),
        (torch.ones(2, 7, 2), 7, "window of 7 is longer than dimension 1"),
        (None, 3, "src must be a torch.tensor"),
    ],
)
def test_wrong_arguments_of_an_update_are_refused(src, size, text):
    def forward(x):
        return poptorch.dynamic_update(x + 1, src, 1, torch.zeros(1, dtype=torch.int), size)

    with pytest.raises(poptorch.Error, match=text):
        poptorch.inferenceModel(forward)(X)


@pytest.mark.examples(6)
@given(st.sampled_from([(1, 6), (1, 3), (1, 2), (0, 2)]), st.integers(1, 4), st.data())
def test_an_ordinary_slice_at_a_value_is_a_window_on_the_ring(shape, step, data):
    dim, size = shape
    before = (slice(None),) * dim
    model = poptorch.inferenceModel(lambda x, s: x[(*before, slice(s, s + size, step))])
    starts = st.integers(0, X.shape[dim] - 1)
    for start in data.draw(st.lists(starts, min_size=1, max_size=3)):
        result = model(X, torch.tensor([start]))
        assert torch.equal(result, ring(X, dim, start, size, step))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_windows_of_two_dims_are_cut_one_after_the_other(step):
    def sliced(x, s):
        return x[s : s + 2, s + 1 : s + 4 : step]

    def called(x, s):
        rows = poptorch.dynamic_slice(x, 0, s, 2, 1)
        return poptorch.dynamic_slice(rows, 1, s + 1, 3, step)

    x, models = torch.randn(4, 6), [poptorch.inferenceModel(f) for f in (sliced, called)]
    for start in range(3):
        for model in models:
            assert torch.equal(model(x, torch.tensor([start])), sliced(x, torch.tensor([start])))


def test_gradients_go_into_an_ordinary_slice():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4, 6))

        def forward(self, start):
            part = self.w[start : start + 2, start + 1 : start + 4 : 2]
            return poptorch.identity_loss((part * torch.tensor([1.0, 2.0])).sum(), "sum")

    model = Model()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    poptorch.trainingModel(model, None, optimizer)(torch.tensor([1]))
    expected = torch.ones(4, 6)
    expected[1:3, 2:5:2] -= torch.tensor([1.0, 2.0])
    assert torch.equal(model.w.detach(), expected)


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (lambda x, s: x[:, s : s + 4], r"slice \(4\) must be a factor of the slicing dimension"),
        (lambda x, s: x[:, s:s], "The start and end of a slice must be different."),
        (lambda x, s: x[:, s:], r"poptorch\.dynamic_slice"),
        (lambda x, s: x[:, s : s + s], r"test_slicing.py:\d+ in"),
    ],
)
def test_an_ordinary_slice_follows_the_rules_of_windows(cut, text):
    with pytest.raises(poptorch.Error, match=text):
        poptorch.inferenceModel(cut)(X, torch.tensor([1]))


def test_an_assigned_slice_names_the_operator_to_use():
    def forward(x, s):
        y = x + 1
        y[:, s : s + 3] = 0
        return y

    with pytest.raises(poptorch.Error, match=r"poptorch\.dynamic_update"):
        poptorch.inferenceModel(forward)(X, torch.tensor([1]))
