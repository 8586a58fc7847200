"""Check what users combine torch.compile with, each against plain PyTorch."""

import logging

import pytest
import torch
from torch import Tensor, nn

import ipu_dynamo
from ipu_dynamo import BackendOptions, Block
from ipu_dynamo.torch_compile.backend import ipu

MICRO_BATCHES = pytest.mark.parametrize("n", [1, 2])


def compiled(model, n=1, **kwargs):
    kwargs = {"fullgraph": True, "options": {"engine": "eager", "micro_batches": n}} | kwargs
    return torch.compile(model, backend=ipu, **kwargs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        with Block("first"):
            x = torch.tanh(self.first(x))
        with Block("second"):
            return self.second(x)


def assert_same(model, call, *inputs):
    """Results and gradients, of parameters and inputs."""
    found = []
    for one in (call, model):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
        result = one(*leaves)
        wanted = [t for t in (*parameters, *leaves) if t.requires_grad]
        gradients = torch.autograd.grad(result.square().sum(), wanted) if wanted else ()
        found.append([result.detach(), *gradients])
    torch.testing.assert_close(found[0], found[1])


@MICRO_BATCHES
def test_inputs_that_require_grad(n):
    model = Net()
    call = compiled(model, n)
    assert_same(model, call, torch.randn(4, 4, requires_grad=True))
    assert_same(model, call, torch.randn(4, 4))
    model.requires_grad_(False)
    assert_same(model, call, torch.randn(4, 4, requires_grad=True))


@MICRO_BATCHES
def test_graph_breaks(n):
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            with Block("first"):
                x = torch.tanh(self.first(x))
                largest = x.detach().max()
            scale = float(largest)  # leaves the graph
            with Block("second"):
                return self.second(x) * scale

    model = Broken()
    with pytest.warns(UserWarning, match="PyTorch breaks the graph"):
        assert_same(model, compiled(model, n, fullgraph=False), torch.randn(4, 4))
    assert len({id(p) for p in ipu_dynamo.programs()}) >= 4  # two graphs, both passes


@MICRO_BATCHES
def test_every_new_shape_is_one_program_and_said_once(n, caplog):
    model = Net()
    call = compiled(model, n)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="ipu_dynamo"):
        for rows in (2, 4, 6, 4, 2):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(call(x), model(x))
    shapes = {
        program.inputs[0].type.shape
        for program in ipu_dynamo.programs()
        if program.inputs and program.calls
    }
    assert {(rows // n, 4) for rows in (2, 4, 6)} <= shapes
    said = [r.getMessage() for r in caplog.records if "compiled again for shape" in r.getMessage()]
    assert len(said) == 1
    assert "[4, 4] of x, after [2, 4]" in said[0]
    assert "compiles a function 8 times" in said[0]


def test_a_module_of_another_shape_is_not_called_a_new_batch(caplog):
    """PyTorch counts them together where they share a forward, as that of Sequential."""
    with caplog.at_level(logging.WARNING, logger="ipu_dynamo"):
        for width in (4, 6):
            model = nn.Sequential(nn.Linear(width, 3), nn.BatchNorm1d(3))
            assert compiled(model)(torch.randn(2, width)).shape == (2, 3)
        assert not caplog.records
        compiled(model)(torch.randn(5, 6))
    (record,) = caplog.records
    assert "[5, 6]" in record.getMessage()
    assert ", after [2, 6]" in record.getMessage()


def test_the_limit_of_recompiles_is_respected():
    call = compiled(lambda x: x * 2)
    with torch._dynamo.config.patch(recompile_limit=2):
        call(torch.ones(2))
        call(torch.ones(3))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            call(torch.ones(4))
    torch._dynamo.reset()
    call = compiled(lambda x: x * 2, fullgraph=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (2, 3, 4, 5):
            assert call(torch.ones(rows)).tolist() == [2.0] * rows
    assert len(ipu_dynamo.programs()) == 2


def test_train_and_eval_are_two_programs():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    call, x = compiled(model), torch.randn(2, 4)
    call(x)
    model.eval()
    assert_same(model, call, x)
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    assert [p.kind for p in ipu_dynamo.programs()].count("inference") == 1


@MICRO_BATCHES
def test_inference_mode(n):
    model, x = Net(), torch.randn(4, 4)
    options = {"engine": "eager", "micro_batches": n, "workers": 2}  # threads are not in that mode
    call = compiled(model, options=options)
    with torch.inference_mode():
        result = call(x)
        torch.testing.assert_close(result, model(x))


def test_a_compiled_function_inside_another():
    inner = compiled(lambda x: torch.tanh(x) * 2)
    model = nn.Linear(4, 4)

    def outer(x):
        return inner(model(x)) + 1

    x = torch.randn(4, 4)
    torch.testing.assert_close(compiled(outer)(x), torch.tanh(model(x)) * 2 + 1)
    assert len(ipu_dynamo.programs()) == 2  # one graph: forward and backward


def test_an_exported_module():
    x = torch.randn(4, 4)
    exported = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (x,)).module()
    assert_same(exported, compiled(exported), x)
    kinds = [p.kind for p in ipu_dynamo.programs()]
    assert kinds == ["forward", "backward"]


def test_gradients_accumulate_and_may_be_kept():
    model, x = Net(), torch.randn(4, 4)
    call = compiled(model)
    loss = call(x).sum()
    loss.backward(retain_graph=True)
    once = model.first.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.first.weight.grad, 2 * once)


def test_equal_options_share_what_is_compiled():
    model, x = Net(), torch.randn(4, 4)
    with torch.no_grad():
        for options in (BackendOptions(engine="eager"), BackendOptions(engine="eager")):
            torch.compile(model, backend=ipu, options=options)(x)
        assert len(ipu_dynamo.programs()) == 1
        torch.compile(model, backend=ipu, options=BackendOptions(engine="eager", workers=1))(x)
    assert len(ipu_dynamo.programs()) == 2


def test_options_are_values():
    assert BackendOptions(engine="eager") == BackendOptions.read({"engine": "eager"})
    assert hash(BackendOptions()) == hash(BackendOptions())
    with pytest.raises(AttributeError):
        BackendOptions().engine = "eager"


def test_reset_forgets_programs_and_notices(caplog):
    call = compiled(lambda x: x * 2)
    for _ in range(2):  # the second reset too, although the call is an old one
        for rows in (2, 3):
            call(torch.ones(rows))
        torch._dynamo.reset()
        assert ipu_dynamo.programs() == ()
    said = [r for r in caplog.records if "compiled again" in r.getMessage()]
    assert len(said) == 2


def test_options_of_another_backend_are_named():
    """`torch.compiler.set_default_backend` sends them here."""
    with pytest.raises(ipu_dynamo.IpuError, match=r"no option .triton.cudagraphs.; it is one"):
        torch.compile(torch.sin, backend=ipu, options={"triton.cudagraphs": True})(torch.ones(2))
