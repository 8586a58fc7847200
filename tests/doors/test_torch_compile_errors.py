"""Check that errors of torch.compile(backend="ipu") are ours, and name the line of the user."""

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import BeginBlock, Block, CompileError, ExecutionError, Options, StageSpec, Strategy
from ipu_dynamo.backend import ipu
from ipu_dynamo.options import OptionError

EAGER = {"engine": "eager"}


def compiled(model, fullgraph=True):
    return torch.compile(model, backend=ipu, fullgraph=fullgraph, options=EAGER)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engin": "eager"}, "there is no option 'engin'; did you mean: engine"),
        ({"engine": "fast"}, "option engine is 'fast'; choose one of auto, inductor, eager"),
        ({"replicas": 2}, "option replicas has no meaning for torch.compile"),
        (Options(gradient_accumulation=4), "option gradient_accumulation has no meaning"),
        ({"strategy": Strategy(kind="pipelined")}, "option strategy is pipelined"),
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
    assert text.startswith("the shape of a result depends on the values of a tensor\n")
    assert "in masked: return x[x > 0].sum()" in text
    assert "BackendCompilerFailed" not in text
    frames = []
    trace = caught.value.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "ipu"
    assert len(frames) <= 5


def test_refuses_operators_with_graphs():
    def choose(x):
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    with pytest.raises(CompileError, match="operator cond holds a graph"):
        compiled(choose)(torch.randn(4))


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

    monkeypatch.setattr("ipu_dynamo.region.lower", fail)
    with pytest.raises(CompileError, match="DataDependentOutputException while compiling"):
        compiled(lambda x: x * 2, fullgraph=False)(torch.ones(2))
    assert ipu_dynamo.programs() == ()


def test_an_error_in_backward_comes_with_the_first_forward(monkeypatch):
    from ipu_dynamo import region

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
