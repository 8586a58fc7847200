"""Check that errors of torch.compile(backend="ipu") are ours, and name the line of the user."""

import warnings

import pytest
import torch
from torch import nn
from torch._higher_order_ops.hints_wrap import hints_wrapper

import ipu_dynamo
from ipu_dynamo import BeginBlock, Block, CompileError, ExecutionError, Options, StageSpec, Strategy
from ipu_dynamo.capture import unplaceable
from ipu_dynamo.options import OptionError
from ipu_dynamo.torch_compile.backend import ipu
from ipu_dynamo.torch_compile.dynamo_errors import readable

EAGER = {"engine": "eager"}


def compiled(model, fullgraph=True):
    return torch.compile(model, backend=ipu, fullgraph=fullgraph, options=EAGER)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engin": "eager"}, "there is no option 'engin'; did you mean: engine"),
        ({"microbatches": 4}, "there is no option 'microbatches'; did you mean: micro_batches"),
        ({"micro_batches": 0}, "option micro_batches takes an int of at least 1, not 0"),
        ({"fallback": "never"}, "option fallback is 'never'; choose one of error, warn, allow"),
        ("eager", "options are a dictionary or ipu_dynamo.BackendOptions"),
        ({"engine": "fast"}, "option engine is 'fast'; choose one of auto, inductor, eager"),
        ({"replicas": 2}, "option replicas has no meaning for torch.compile"),
        (Options(gradient_accumulation=4), "option gradient_accumulation has no meaning"),
        ({"strategy": Strategy(kind="pipelined")}, "option strategy is pipelined"),
        (
            {"strategy": Strategy("pipelined", schedule="1f1b"), "micro_batches": 4},
            "has schedule '1f1b', but micro-batches of torch.compile run as in GPipe",
        ),
        (
            {"strategy": Strategy(kind="serial_phased", phases=((StageSpec(("a",), 0),),))},
            "option strategy is serial_phased",
        ),
    ],
)
def test_refuses_options(options, text):
    with pytest.raises(OptionError, match=text):
        torch.compile(torch.sin, backend=ipu, options=options)(torch.ones(2))


def test_refuses_modes():
    with pytest.raises(OptionError, match="mode='max-autotune'"):
        torch.compile(torch.sin, backend=ipu, mode="max-autotune")(torch.ones(2))


def test_a_compile_error_has_the_users_line():
    def masked(x):
        return x[x > 0].sum()  # as many as there are

    with pytest.raises(CompileError) as caught:
        compiled(masked)(torch.randn(4))
    text = str(caught.value)
    assert text.startswith("1 operator cannot be placed on an IPU\n1 x indexing: the shape of")
    assert "in masked: return x[x > 0].sum()" in text
    assert "BackendCompilerFailed" not in text
    frames = []
    trace = caught.value.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "compile_readably"
    assert len(frames) <= 5


@torch.library.custom_op("door_tests::on_the_host", mutates_args=())
def on_the_host(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


@on_the_host.register_fake
def _(x):
    return torch.empty_like(x)


def many_faults(x):
    first = x[x > 0].sum()
    second = torch.nonzero(x).sum() + torch.nonzero(x + 1).sum()
    third = on_the_host(x).sum()
    fourth = torch.ones(3, device="meta")
    return first + second + third, fourth.shape[0]


def test_everything_that_cannot_be_placed_is_listed_at_once():
    with pytest.raises(CompileError) as caught:
        compiled(many_faults)(torch.randn(4))
    found = {one.operator: one for one in caught.value.found}
    assert set(found) == {"indexing", "nonzero", "door_tests.on_the_host.default", "ones"}
    assert found["nonzero"].count == 2
    assert "second = torch.nonzero(x).sum()" in found["nonzero"].where
    assert "runs on the host" in found["door_tests.on_the_host.default"].reason
    assert "is on device meta" in found["ones"].reason
    assert all(one.hint and str(one) in str(caught.value) for one in found.values())
    assert str(caught.value).startswith("5 operators cannot be placed on an IPU\n")


def test_the_hint_names_what_a_library_has_instead(monkeypatch):
    monkeypatch.setitem(unplaceable._INSTEAD, "door_tests.on_the_host", "set its other form")
    with pytest.raises(CompileError, match="try:  set its other form"):
        compiled(lambda x: on_the_host(x))(torch.randn(4))
    grouped = unplaceable._INSTEAD["transformers.grouped_mm_fallback"]
    assert 'experts_implementation="batched_mm"' in grouped


def test_fallback_runs_a_graph_in_plain_pytorch():
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)

    def run(x):
        return x[x > 0].square().sum()

    for fallback in ("warn", "allow"):
        torch._dynamo.reset()
        options = {"engine": "eager", "fallback": fallback}
        call = torch.compile(run, backend=ipu, fullgraph=True, options=options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = call(x)
        texts = [
            str(one.message) for one in said if "PyTorch runs a graph itself" in str(one.message)
        ]
        assert len(texts) == (fallback == "warn")
        assert all("1 x indexing" in text for text in texts)
        x.grad = None
        result.backward()
        assert result.item() == 10.0
        assert x.grad.tolist() == [2.0, 0.0, 6.0]
        assert ipu_dynamo.programs() == ()


def test_fallback_runs_the_graph_that_passes_have_not_changed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(4, 4, 2, dropout=0.5)

        def forward(self, x, n):
            return torch.zeros(int(n.item())) + self.layer(x)[0].sum()

    torch.manual_seed(1)
    model, inputs = Model(), (torch.randn(5, 2, 4), torch.tensor(3))
    options = EAGER | {"fallback": "allow"}
    results = []
    with torch._dynamo.config.patch(
        allow_rnn=True, capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        call = torch.compile(model, backend=ipu, fullgraph=True, options=options)
        for run in (model, call):
            torch.manual_seed(2)
            model.zero_grad()
            loss = run(*inputs)
            loss.sum().backward()
            results.append((loss.detach(), model.layer.weight_hh_l0.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_number_that_becomes_a_size_is_listed_too():
    def run(x):
        return torch.ones(int(x.sum().item())) * torch.zeros(int(x.max().item()))

    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(CompileError, match="cannot be placed") as caught,
    ):
        compiled(run)(torch.ones(3))
    assert sum(one.count for one in caught.value.found) >= 2
    assert "in run: return torch.ones(int(x.sum().item()))" in str(caught.value)


def test_complex_numbers_are_computed():
    """They can be placed: programs hold them, unlike an IPU's own types."""
    x = torch.randn(8)
    found = compiled(lambda x: torch.fft.rfft(x).abs())(x)
    torch.testing.assert_close(found, torch.fft.rfft(x).abs())
    assert len(ipu_dynamo.programs()) == 1


def test_sparse_tensors_are_no_silent_eager():
    """Dynamo does not hand them over; with fullgraph it says so itself."""
    sparse = torch.eye(3).to_sparse()
    with pytest.raises((CompileError, torch._dynamo.exc.Unsupported)):
        compiled(lambda s, x: s @ x)(sparse, torch.ones(3, 1))


def test_refuses_operators_with_graphs():
    def hinted(x):
        return hints_wrapper(lambda y: y + 1, (x,), {}, hints={"a": True})

    with pytest.raises(CompileError, match="1 x hints_wrapper: it holds a graph"):
        compiled(hinted)(torch.randn(4))


def test_refuses_dynamic_dimensions():
    x = torch.randn(4, 3)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(CompileError, match="dimension 0 of x is marked as dynamic"):
        compiled(lambda x: x * 2)(x)


def test_an_operator_outside_all_blocks():
    def run(x):
        with Block("a"):
            y = x * 2
        return y + 1

    with pytest.raises(CompileError, match=r"No active Block[\s\S]*return y \+ 1"):
        compiled(run)(torch.ones(2))


def test_a_break_inside_a_block_is_an_error_not_eager():
    def run(x):
        with Block("a"):
            y = x * 2
            print()
            return y + 1

    with pytest.raises(CompileError, match="block 'a' begins right before a graph break"):
        compiled(run, fullgraph=False)(torch.ones(2))


def test_warns_once_of_a_break():
    def run(x):
        y = x * 2
        print()
        return y + 1

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call = compiled(run, fullgraph=False)
        results = [call(torch.ones(rows)) for rows in (2, 3, 4)]
    assert [r.tolist() for r in results] == [[3.0] * n for n in (2, 3, 4)]
    texts = [str(one.message) for one in said if "breaks the graph" in str(one.message)]
    assert len(texts) == 1
    assert "What is there runs in plain PyTorch" in texts[0]


def test_warns_when_pytorch_hides_errors():
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        pytest.warns(UserWarning, match="suppress_errors is set"),
    ):
        compiled(lambda x: x * 2, fullgraph=False)(torch.ones(2))


def test_warns_where_a_break_ends_a_block():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = BeginBlock(nn.Linear(3, 3))

        def forward(self, x):
            x = self.layer(x * 2)
            print()
            return x + 1

    model, x = Broken(), torch.randn(2, 3)
    with pytest.warns(UserWarning, match=r"breaks the graph at test_torch_compile_errors.py:\d+"):
        result = compiled(model, fullgraph=False)(x)
    assert torch.equal(result, model(x))


def test_an_operator_that_raises_names_stage_and_line():
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            BeginBlock(self.second)

        def forward(self, x, index):
            return self.second(self.first(x))[index]

    model = Lookup()
    call, x = compiled(model), torch.randn(2, 3)
    call(x, torch.tensor([0]))
    with pytest.raises(ExecutionError, match=r"out of bounds") as caught:
        call(x, torch.tensor([9]))
    assert caught.value.stage == 1
    assert "return self.second(self.first(x))[index]" in caught.value.where
    good = torch.tensor([1])
    assert torch.equal(call(x, good), model(x, good))


def test_a_fault_of_ours_is_no_silent_eager(monkeypatch):
    """Dynamo would treat some kinds of exceptions as a graph break."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    def fail(*args, **kwargs):
        raise DataDependentOutputException(torch.ops.aten.item.default)

    monkeypatch.setattr("ipu_dynamo.torch_compile.compile_graph.lower", fail)
    with pytest.raises(CompileError, match="DataDependentOutputException while compiling"):
        compiled(lambda x: x * 2, fullgraph=False)(torch.ones(2))
    assert ipu_dynamo.programs() == ()


def test_an_error_in_backward_comes_with_the_first_forward(monkeypatch):
    from ipu_dynamo.torch_compile import compile_graph as region

    lower = region.lower

    def fail(capture, *args, **kwargs):
        if capture.alone == "backward":
            raise CompileError("no backward today")
        return lower(capture, *args, **kwargs)

    monkeypatch.setattr(region, "lower", fail)
    with pytest.raises(CompileError, match="no backward today"):
        compiled(lambda x: x * 2)(torch.ones(2, requires_grad=True))


def test_refuses_torchs_cache_of_passes():
    with (
        torch._functorch.config.patch(force_autograd_cache=True),
        pytest.raises(CompileError, match="does not know stages"),
    ):
        compiled(lambda x: x * 2)(torch.ones(2))


def test_double_backward_is_refused():
    x = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(lambda x: (x**3).sum())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("error", [CompileError("a problem"), ValueError("a problem")])
def test_an_error_keeps_its_notes_once(error):
    error.add_note("in pass Outline")
    result = readable(error, None)
    assert result.__notes__.count("in pass Outline") == 1
    assert len(set(result.__notes__)) == len(result.__notes__)
    result.add_note("more")
    assert "more" not in error.__notes__
