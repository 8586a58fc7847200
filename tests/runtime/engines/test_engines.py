"""Check that engines compute the same, count what they compile, and say why they cannot."""

import importlib
import inspect
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import ipu_dynamo.ops.private.native as native
import ipu_dynamo.runtime.engines.engines as engines
from ipu_dynamo import IpuError, Options, compile_inference, compile_training
from ipu_dynamo.errors import OptionError
from ipu_dynamo.runtime.engines.check.checks import CHECK
from ipu_dynamo.runtime.engines.engines import ENGINE, EagerEngine, make_engine
from ipu_dynamo.runtime.engines.layouts import laid_out, views_of
from ipu_dynamo.testing import assert_close, assert_same_bits
from ipu_dynamo.torch_compile.backend import ipu

aten = torch.ops.aten


@pytest.fixture
def no_compiler(monkeypatch):
    for module in (engines, native):
        monkeypatch.setattr(module, "cpp_compiler_names", lambda: ("g++ -DX",))
    engines._compiler.cache_clear()
    yield
    engines._compiler.cache_clear()


def test_drops_the_warning_that_inductor_gives(caplog):
    engines.mute_inductor()
    engines.mute_inductor()
    text = "standalone_compile artifact generation failed, cannot save. "
    module = "torch._inductor.standalone_compile"
    assert text in inspect.getsource(importlib.import_module(module))
    logger = logging.getLogger(module)
    with caplog.at_level(logging.WARNING, logger=module):
        logger.warning(text)
        logger.warning("another one")
    assert [record.getMessage() for record in caplog.records] == ["another one"]


def test_eager_is_eager():
    assert make_engine("eager").name == "eager"


def test_auto_without_a_compiler_is_eager_and_says_so_in_one_line(no_compiler, caplog, monkeypatch):
    monkeypatch.delenv(ENGINE, raising=False)
    assert make_engine("auto").name == "eager"
    assert make_engine("auto").name == "eager"
    assert [r.message for r in caplog.records if r.name.startswith("ipu_dynamo")] == [
        "no C++ compiler found (tried 'g++ -DX', each the name of a program without options): "
        "stages run on the eager engine, operator by operator"
    ]


def test_inductor_without_a_compiler_is_refused(no_compiler):
    with pytest.raises(IpuError, match=r"needs a C\+\+ compiler \(tried 'g\+\+ -DX'.*: install"):
        make_engine("inductor")


def test_environment_chooses_what_auto_stands_for(monkeypatch):
    monkeypatch.setenv(ENGINE, "eager")
    assert make_engine("auto").name == "eager"
    assert compile_inference(lambda x: x + 1)(torch.ones(1)) == 2
    monkeypatch.setenv(ENGINE, "fast")
    with pytest.raises(IpuError, match="IPU_DYNAMO_ENGINE is 'fast': choose one of auto, inductor"):
        make_engine("auto")
    monkeypatch.setenv(ENGINE, "eager")
    monkeypatch.setenv(CHECK, "always")
    with pytest.raises(OptionError, match="IPU_DYNAMO_CHECK_COMPILED is 'always'; choose one of f"):
        make_engine("auto")


def test_engine_counts_what_it_compiles():
    run = compile_inference(lambda x: x + 1, Options("eager"))
    assert run.functions_compiled == 0
    for _ in range(3):
        run(torch.ones(2))
    assert run.functions_compiled == 1
    assert isinstance(run._engine, EagerEngine)


class Net(nn.Module):
    """Layers whose fused kernels would keep more digits than float16 has."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x, y):
        h = F.gelu(self.norm(self.first(x))) * 1.1 + 0.3
        h = torch.sigmoid(self.second(h)) / 3 - 0.1
        return F.mse_loss(h, y), h.softmax(1), h.exp().sum(1)


def train(engine, dtype):
    torch.manual_seed(0)
    model = Net().to(dtype)
    options = Options(engine, gradient_accumulation=2)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.05), options)
    x, y = torch.randn(64, 16).to(dtype), torch.randn(64, 8).to(dtype)
    outputs = [step(x, y) for _ in range(2)]
    return outputs, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.inductor
def test_inductor_trains_float32_as_eager_within_rounding():
    assert_close(train("inductor", torch.float32), train("eager", torch.float32))


@pytest.mark.inductor
def test_inductor_rounds_float16_after_every_operator_as_eager():
    def model(x, y):
        h = (x * 1.1 + y) / y - x * y
        return h, (h * 0.7 + x) * 3 - h, torch.sqrt(h * h + y) * 0.3 + x

    torch.manual_seed(0)
    x, y = torch.randn(64, 64).half(), torch.rand(64, 64).half() + 0.5
    eager, inductor = (compile_inference(model, Options(e))(x, y) for e in ("eager", "inductor"))
    assert_same_bits(inductor, eager)
    assert_same_bits(inductor, model(x, y))


BESIDE_FLOAT16 = {
    "x + 0.3": lambda x: x + 0.3,
    "x - 0.3": lambda x: x - 0.3,
    "0.3 - x": lambda x: 0.3 - x,
    "|x| ** 0.3": lambda x: x.abs() ** 0.3,
    "x * 0.3": lambda x: x * 0.3,
    "x / 0.3": lambda x: x / 0.3,
    "0.3 / x": lambda x: 0.3 / x,
}


def beside_float16(changes):
    """Compare what is computed of numbers and a float16 tensor, of all in one compilation."""
    torch.manual_seed(0)
    x = torch.randn(64, 64).half()

    def model(x):
        return tuple(change(x) for change in changes.values())

    found, expected = (
        dict(zip(changes, results, strict=True))
        for results in (compile_inference(model, Options("inductor"))(x), model(x))
    )
    assert_same_bits(found, expected)


@pytest.mark.inductor
def test_inductor_rounds_numbers_beside_float16_as_eager():
    beside_float16(BESIDE_FLOAT16)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("name", BESIDE_FLOAT16)
def test_inductor_rounds_a_number_beside_float16_as_eager(name):
    beside_float16({name: BESIDE_FLOAT16[name]})


@pytest.mark.inductor
def test_inductor_rounds_remainders_of_float16_as_eager():
    beside_float16({"x % 0.3": lambda x: x % 0.3})


@pytest.mark.inductor
def test_inductor_keeps_memory_layouts_between_stages():
    def model(x):
        return torch.cat([x.t(), x.t()], 1).t(), x.t(), x.expand(2, 3, 4)[1]

    x = torch.randn(3, 4)
    run = compile_inference(model, Options("inductor"))
    assert_same_bits([r.contiguous() for r in run(x)], [r.contiguous() for r in model(x)])


@pytest.mark.inductor
def test_inductor_keeps_repeated_elements_between_forward_and_backward():
    """It returns the gradient of a sum as memory of its own, which its readers expect as one."""
    torch.manual_seed(0)
    layer, x = nn.Linear(2, 1).double(), torch.randn(4, 2, dtype=torch.float64)
    options = {"engine": "inductor", "micro_batches": 2}
    torch.compile(lambda x: layer(x).sum(), backend=ipu, options=options)(x).backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0, keepdim=True))


@pytest.mark.inductor
def test_function_without_operators_is_not_compiled_by_inductor():
    x = torch.randn(2)
    assert_same_bits(compile_inference(lambda x, y: (x, y), Options("inductor"))(x, x), (x, x))


@pytest.mark.inductor
@pytest.mark.parametrize("values", [lambda h: h, lambda h: 2 * h.relu(), lambda h: h[[1, 0, 2]]])
def test_adding_rows_of_a_value_to_itself_is_right_on_inductor(values):
    """Inductor of PyTorch 2.13 alone overwrites what it still has to read."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 3), torch.randn(3, 3)
    index = torch.tensor([1, 1, 0])

    def model(x, weight):
        h = x @ weight
        rows = h.index_add(0, index, values(h))
        return rows @ weight, x.t() @ rows

    run = compile_inference(model, Options("inductor"))
    for found, expected in zip(run(x, weight), model(x, weight), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_result_and_a_view_of_it_are_two_objects():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (x,))
    view = graph.call_function(aten.view.default, (y, [2, 2]))
    graph.output((y, view, y, graph.call_function(aten.detach.default, (view,)), x))
    one, x = torch.ones(2, 2), torch.zeros(2, 2)
    views = views_of(fx.GraphModule({}, graph))
    results = laid_out(lambda _: [one] * 4 + [x], [(2, 1)] * 5, [(2, 1)] * 5, views)([])
    assert results[0] is results[2] is one
    assert len({id(result) for result in results}) == 4
    assert {result.data_ptr() for result in results} == {one.data_ptr(), x.data_ptr()}
