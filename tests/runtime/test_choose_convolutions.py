"""Check that small convolutions by either code are PyTorch's, and that measurements decide."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import ipu_dynamo
from ipu_dynamo import Options, compile_training
from ipu_dynamo.runtime import choose_convolutions, convolution_times
from ipu_dynamo.runtime.convolution_times import ConvolutionShape
from ipu_dynamo.runtime.native_convolution import native_convolution, native_convolution_backward
from ipu_dynamo.runtime.product_choice import MATMUL
from ipu_dynamo.runtime.stage_store import CACHE_DIR, OFF
from ipu_dynamo.testing import assert_close, assert_same_inference, assert_same_training

aten = torch.ops.aten
NATIVE = {"torch": 2.0, "native": 1.0}
TORCH = {"torch": 1.0, "native": 1.0}


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
    """Targets of the convolutions of a training step, after the choice."""
    (function,) = step_of(model, x).program.functions
    function = choose_convolutions.choose_convolutions(function, lambda of: times)
    targets = [node.target for node in function.operators]
    return [target for target in targets if "convolution" in str(target)]


@given(
    n=st.integers(1, 3),
    channels=st.integers(1, 3),
    filters=st.integers(1, 3),
    size=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    mask=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    bias=st.booleans(),
)
def test_the_other_code_computes_the_same(
    n, channels, filters, size, kernel, stride, padding, mask, bias
):
    assume(all(s + 2 * p >= k for s, p, k in zip(size, padding, kernel, strict=True)))
    torch.manual_seed(0)
    x, weight = torch.randn(n, channels, *size), torch.randn(filters, channels, *kernel)
    b = torch.randn(filters) if bias else None
    rest = [[1, 1], False, [0, 0], 1]
    expected = aten.convolution(x, weight, b, stride, padding, *rest)
    assert_close(native_convolution(x, weight, b, stride, padding), expected)
    grad = torch.randn_like(expected)
    theirs = aten.convolution_backward(
        grad, x, weight, [filters], stride, padding, *rest, list(mask)
    )
    ours = native_convolution_backward(grad, x, weight, stride, padding, list(mask))
    meta = native_convolution_backward(
        *(t.to("meta") for t in (grad, x, weight)), stride, padding, list(mask)
    )
    for one, other, shape, wanted in zip(ours, theirs, meta, mask, strict=True):
        assert shape.shape == one.shape
        assert shape.stride() == one.stride()
        if wanted:
            assert_close(one, other, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"padding": 1}, {"stride": 2}, {"bias": False}])
def test_measurements_decide(settings):
    x = torch.randn(2, 2, 12, 12)
    found = chosen(Small(**settings), x, NATIVE)
    assert found == [native_convolution] * 2 + [native_convolution_backward] * 2
    assert native_convolution not in chosen(Small(**settings), x, TORCH)
    assert native_convolution not in chosen(Small(**settings), x, None)


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
    assert aten.convolution.default in chosen(model, x, NATIVE)


def test_a_weight_with_its_channels_last_stays():
    model = Small().to(memory_format=torch.channels_last)
    assert native_convolution not in chosen(model, torch.randn(2, 2, 12, 12), NATIVE)


@pytest.mark.inductor
def test_a_weight_of_one_pixel_with_its_channels_last_stays(monkeypatch):
    """Its strides are another order, though PyTorch calls it contiguous."""
    monkeypatch.setattr(
        choose_convolutions.choose_convolutions, "__defaults__", (lambda of: NATIVE,)
    )
    model = nn.Conv2d(2, 4, 1).to(memory_format=torch.channels_last)
    assert model.weight.is_contiguous()
    x = torch.randn(2, 2, 6, 6)
    assert_same_inference(model, [(x,)], {"engine": "inductor"})
    assert_same_inference(model, [(x[:, :, :1, :1],)], {"engine": "inductor"})


@pytest.mark.parametrize("last", ["x", "weight", "both", "grad"])
@pytest.mark.parametrize("kernel", [1, 2])
@pytest.mark.parametrize("size", [1, 5])
def test_results_lie_as_the_shape_functions_say(last, kernel, size):
    def of(name, *shape):
        made = torch.randn(*shape)
        turns = last in (name, "both")
        return made.to(memory_format=torch.channels_last) if turns else made

    x, weight = (
        of("x", 2, 3, size + kernel - 1, size + kernel - 1),
        of("weight", 4, 3, kernel, kernel),
    )
    grad = of("grad", 2, 4, size, size)
    given = [
        (native_convolution, (x, weight, None, [1, 1], [0, 0])),
        (native_convolution_backward, (grad, x, weight, [1, 1], [0, 0], [True, True, True])),
    ]
    for op, args in given:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_the_default_dtype_and_device_are_not_measured():
    one = ConvolutionShape((1, 1, 6, 6), (2, 1, 3, 3), (1, 1), (0, 0), (True, True, True))
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_default_dtype", lambda: torch.float64)
        ways = convolution_times._ways(one)
        results = [result for way in ways.values() for result in way()]
    assert {result.device.type for result in results} == {"cpu"}
    assert {result.dtype for result in results} == {torch.float32}


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
        convolution_times.forget()


def test_a_forced_library_is_not_measured(monkeypatch):
    monkeypatch.setenv(MATMUL, "torch")
    assert native_convolution not in chosen(Small(), torch.randn(2, 2, 12, 12), NATIVE)


@pytest.mark.inductor
@pytest.mark.parametrize("times", [NATIVE, TORCH])
@pytest.mark.parametrize("only", ["forward", "backward", "all"])
def test_trains_as_plain_pytorch(monkeypatch, times, only):
    """Also where one of the two passes stays with oneDNN, in whose layout Inductor keeps values."""

    def measured(of):
        return times if only in ("all", "backward" if of.mask else "forward") else TORCH

    monkeypatch.setattr(choose_convolutions.choose_convolutions, "__defaults__", (measured,))
    data = [(torch.randn(4, 2, 12, 12),) for _ in range(2)]
    options = Options(engine="inductor", gradient_accumulation=2)
    assert_same_training(Small(), data, options, loss=0)


def test_what_was_measured_stays(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    convolution_times.forget()
    for mask in ((), (True, True, True)):
        one = ConvolutionShape((1, 1, 6, 6), (2, 1, 3, 3), (1, 1), (0, 0), mask)
        first = convolution_times.convolution_times(one)
        assert set(first) == {"torch", "native"}
        assert all(0 < seconds < 10 for seconds in first.values())
        monkeypatch.setattr(convolution_times, "measure", None)  # must not be called again
        convolution_times.forget()
        assert convolution_times.convolution_times(one) == first
        monkeypatch.undo()
        monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    convolution_times.forget()
    monkeypatch.setenv(CACHE_DIR, OFF)
    assert convolution_times.convolution_times(one) is None
    convolution_times.forget()


@pytest.mark.inductor
def test_explain_shows_the_choice():
    shown = str(ipu_dynamo.explain(Small(), torch.randn(2, 2, 12, 12)))
    assert "small convolutions:" in shown
    assert "forward of 2 x 2 x 12 x 12 with 4 x 2 x 3 x 3" in shown
