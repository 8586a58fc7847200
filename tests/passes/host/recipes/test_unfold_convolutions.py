"""Check that small convolutions by either code are PyTorch's, and that measurements decide."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import ipu_dynamo
from ipu_dynamo import Options, compile_inference, compile_training
from ipu_dynamo.passes.host.recipes import unfold_convolutions
from ipu_dynamo.passes.host.recipes.convolution_matmuls import convolution, gradients
from ipu_dynamo.passes.host.recipes.unfold_convolutions import is_dense
from ipu_dynamo.testing import assert_close, assert_same_inference, assert_same_training
from ipu_dynamo.tune import autotune_cache, convolution_times
from ipu_dynamo.tune.artifact_store import CACHE_DIR, OFF
from ipu_dynamo.tune.convolution_shape import ConvolutionShape
from ipu_dynamo.tune.matmul_choice import MATMUL

aten = torch.ops.aten
FOUR = [aten.convolution.default] * 2 + [aten.convolution_backward.default] * 2
MATMULS = {"torch": 2.0, "matmuls": 1.0}
TORCH = {"torch": 1.0, "matmuls": 1.0}


@pytest.fixture(autouse=True)
def ask(monkeypatch):
    monkeypatch.delenv(MATMUL, raising=False)


class Small(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(2, 4, 3, **settings)
        self.second = nn.Conv2d(4, 3, 3, bias=False)

    def forward(self, x):
        return self.second(self.first(x).relu()).square().mean()


def step_of(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, {"engine": "eager"}, loss=0)
    step.compile(x)
    return step


def chosen(model, x, times):
    """The convolutions that stay in a training step, after the choice."""
    (function,) = step_of(model, x).program.functions
    uses = unfold_convolutions.plan(function.graph.graph, lambda of: times)
    function = unfold_convolutions.apply(function, [n for n, use in uses.items() if use.matmuls])
    targets = [node.target for node in function.operators]
    return [target for target in targets if "convolution" in str(target)]


@given(
    n=st.integers(1, 3),
    channels=st.integers(1, 3),
    filters=st.integers(1, 3),
    size=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    kernel=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    bias=st.booleans(),
)
def test_products_compute_the_same(n, channels, filters, size, kernel, stride, padding, bias):
    assume(all(s + 2 * p >= k for s, p, k in zip(size, padding, kernel, strict=True)))
    torch.manual_seed(0)
    x, weight = torch.randn(n, channels, *size), torch.randn(filters, channels, *kernel)
    b = torch.randn(filters) if bias else None
    rest = [[1, 1], False, [0, 0], 1]
    expected = aten.convolution(x, weight, b, stride, padding, *rest)
    made = convolution(x, weight, b, stride, padding)
    assert is_dense(made)
    assert_close(made, expected, atol=1e-5)
    grad = torch.randn_like(expected)
    theirs = aten.convolution_backward(
        grad, x, weight, [filters], stride, padding, *rest, [True, True, True]
    )
    mask = [stride == (1, 1), True, True]
    made = gradients(grad, x, weight, stride, padding, mask)
    assert [ours is not None for ours in made] == mask
    for ours, other in zip(made, theirs, strict=True):
        if ours is not None:
            assert is_dense(ours)
            assert_close(ours, other, atol=1e-5)
    assert gradients(grad, x, weight, stride, padding, [False] * 3) == [None] * 3


@pytest.mark.parametrize("settings", [{}, {"padding": 1}, {"stride": 2}, {"bias": False}])
def test_measurements_decide(settings):
    x = torch.randn(2, 2, 12, 12)
    assert chosen(Small(**settings), x, MATMULS) == []
    assert chosen(Small(**settings), x, TORCH) == FOUR
    assert chosen(Small(**settings), x, None) == FOUR


@pytest.mark.parametrize(
    ("settings", "x"),
    [
        ({"dilation": 2}, torch.randn(2, 2, 12, 12)),
        ({"groups": 2}, torch.randn(2, 2, 12, 12)),
        ({}, torch.randn(2, 2, 700, 700)),
        ({"dtype": torch.float64}, torch.randn(2, 2, 12, 12, dtype=torch.float64)),
    ],
)
def test_other_convolutions_stay(settings, x):
    model = Small(**settings)
    model.second.to(x.dtype)
    assert aten.convolution.default in chosen(model, x, MATMULS)


def test_a_weight_with_its_channels_last_stays():
    model = Small().to(memory_format=torch.channels_last)
    assert chosen(model, torch.randn(2, 2, 12, 12), MATMULS) == FOUR


@pytest.mark.inductor
def test_a_weight_of_one_pixel_with_its_channels_last_stays(monkeypatch):
    """Its strides are another order, though PyTorch calls it contiguous."""
    monkeypatch.setattr(unfold_convolutions, "convolution_times", lambda of: MATMULS)
    model = nn.Conv2d(2, 4, 1).to(memory_format=torch.channels_last)
    assert model.weight.is_contiguous()
    x = torch.randn(2, 2, 6, 6)
    assert_same_inference(model, [(x,)], {"engine": "inductor"})
    assert_same_inference(model, [(x[:, :, :1, :1],)], {"engine": "inductor"})


@pytest.mark.parametrize("mask", [(), (True, True, True), (False, True, False)])
def test_the_default_dtype_and_device_are_not_measured(mask, monkeypatch):
    def results(ways, seconds):
        seen.extend(way() for way in ways.values())
        return dict.fromkeys(ways, 1.0)

    seen = []
    monkeypatch.setattr(convolution_times, "shortest_times", results)
    one = ConvolutionShape((1, 1, 6, 6), (2, 1, 3, 3), (1, 1), (0, 0), mask)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            convolution_times.measure(one)
    finally:
        torch.set_default_dtype(before)
    tensors = [t for t in tree_leaves(seen) if isinstance(t, torch.Tensor)]
    assert tensors
    assert {(t.device.type, t.dtype) for t in tensors} == {("cpu", torch.float32)}


def test_threads_that_measure_at_once_leave_the_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    shapes = [ConvolutionShape((1, 1, 6, n), (2, 1, 3, 3), (1, 1), (0, 0)) for n in range(6, 10)]
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(convolution_times.convolution_times, shapes))
            assert {pool.submit(torch.get_num_threads).result() for _ in shapes} == {3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
        autotune_cache.forget()


@pytest.mark.inductor
def test_autocast_around_the_compilation_changes_no_matmul(tmp_path, monkeypatch):
    class Exact(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Small()

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.inner(x)

    monkeypatch.setattr(unfold_convolutions, "convolution_times", lambda of: MATMULS)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    model, x = Exact(), torch.randn(2, 2, 12, 12)
    with torch.autocast("cpu", torch.bfloat16):
        found = compile_inference(model, {"engine": "inductor"})(x)
    assert_close(found, model(x))


def test_nothing_is_measured_where_nothing_can_be_kept(tmp_path, monkeypatch, caplog):
    (tmp_path / "convolutions").touch()
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    monkeypatch.setattr(convolution_times, "measure", None)
    autotune_cache.forget()
    one = ConvolutionShape((1, 1, 6, 6), (2, 1, 3, 3), (1, 1), (0, 0))
    assert convolution_times.convolution_times(one) is None
    assert "nothing that is measured can be kept" in caplog.text
    autotune_cache.forget()


def test_a_forced_library_is_not_measured(monkeypatch):
    monkeypatch.setenv(MATMUL, "torch")
    assert chosen(Small(), torch.randn(2, 2, 12, 12), MATMULS) == FOUR


@pytest.mark.few(2)
@pytest.mark.inductor
@pytest.mark.parametrize("products", ["forward", "backward", "both", "none"])
def test_trains_as_plain_pytorch(monkeypatch, products):
    """Also where one of the two passes stays with oneDNN, in whose layout Inductor keeps values."""

    def measured(of):
        return MATMULS if products in ("both", "backward" if of.mask else "forward") else TORCH

    monkeypatch.setattr(unfold_convolutions, "convolution_times", measured)
    data = [(torch.randn(4, 2, 12, 12),) for _ in range(2)]
    options = Options(engine="inductor", gradient_accumulation=2)
    assert_same_training(Small(), data, options, loss=0)


def test_what_was_measured_stays(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    autotune_cache.forget()
    for mask in ((), (True, True, True)):
        one = ConvolutionShape((1, 1, 6, 6), (2, 1, 3, 3), (1, 1), (0, 0), mask)
        first = convolution_times.convolution_times(one)
        assert set(first) == {"torch", "matmuls"}
        assert all(0 < seconds < 10 for seconds in first.values())
        monkeypatch.setattr(convolution_times, "measure", None)  # must not be called again
        autotune_cache.forget()
        assert convolution_times.convolution_times(one) == first
        monkeypatch.undo()
        monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    autotune_cache.forget()
    monkeypatch.setenv(CACHE_DIR, OFF)
    assert convolution_times.convolution_times(one) is None
    autotune_cache.forget()


@pytest.mark.slow
@pytest.mark.inductor
def test_explain_shows_the_choice():
    shown = ipu_dynamo.explain(Small(), torch.randn(2, 2, 12, 12)).details
    assert "UnfoldConvolutions: " in shown
    assert "forward of 2 x 2 x 12 x 12 with 4 x 2 x 3 x 3" in shown
