"""Check functions of the host in the middle of a program."""

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import Block, CompileError, ExecutionError, HostFunction, Options, Strategy
from ipu_dynamo.ops.library.host_call import register

ENGINES = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]


class Doubled(nn.Module):
    """A layer, and a function of the host between two operators."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.host = HostFunction(function, "halve")

    def forward(self, x):
        return torch.relu(self.host(self.layer(x).tanh() * 2)) + 1


def with_numpy(x):
    return torch.from_numpy(x.numpy() / 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_host_function_gets_the_values_of_every_micro_batch_in_order(engine):
    seen = []

    def function(x):
        seen.append(x.clone())
        x.zero_()  # a copy: nobody else sees it
        return with_numpy(seen[-1])

    model = Doubled(function)
    compiled = ipu_dynamo.compile_inference(
        model, Options(engine=engine, device_iterations=3, workers=2)
    )
    x = torch.randn(6, 3)
    results = [compiled(x).clone() for _ in range(2)]
    assert torch.equal(seen[0], torch.zeros(2, 4))  # while tracing
    expected = model.layer(x).tanh() * 2
    assert torch.allclose(torch.cat(seen[1:4]), expected)
    assert len(seen) == 7
    assert torch.allclose(results[0], torch.relu(expected / 2) + 1)
    assert torch.equal(*results)


def test_it_may_take_and_return_any_structure_and_read_the_models_own_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.host = HostFunction(self.on_host)

        def on_host(self, pair, factor):
            assert not torch.compiler.is_compiling() or pair["x"].sum() == 0
            y = nn.functional.linear(pair["x"], self.layer.weight.detach())
            return {"y": y * factor, "n": 3, "any": (pair["i"] > y.sum().item()).any()}

        def forward(self, x, i):
            found = self.host({"x": x, "i": i}, 2.0)
            return found["y"] + found["n"], found["any"]

    model = Model()
    x, i = torch.randn(4, 2), torch.arange(4)
    y, flag = ipu_dynamo.compile_inference(model, Options(engine="eager"))(x, i)
    expected = nn.functional.linear(x, model.layer.weight)
    assert torch.allclose(y, expected * 2 + 3)
    assert flag.item() == (i > expected.sum()).any().item()


def test_it_may_have_no_inputs_and_no_results():
    drawn, seen = iter(range(1, 9)), []
    source = HostFunction(lambda: torch.full((2,), float(next(drawn))), "source")
    sink = HostFunction(lambda x: seen.append(x.sum().item()), "sink")

    def forward(x):
        y = x + source()
        sink(y)
        return y

    compiled = ipu_dynamo.compile_inference(forward, Options(engine="eager", device_iterations=2))
    assert compiled(torch.zeros(4)).tolist() == [2, 2, 3, 3]
    assert seen == [0.0, 4.0, 6.0]  # zeros while tracing


def test_it_may_compute_a_gradient_of_its_own():
    def slope(x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            x.register_hook(lambda gradient: gradient * 2)
            (x**2).sum().backward()
        return x.grad

    compiled = ipu_dynamo.compile_inference(HostFunction(slope), Options(engine="eager"))
    assert compiled(torch.tensor([1.0, 2.0])).tolist() == [4.0, 8.0]


def test_stages_on_several_ipus_call_the_host():
    host = HostFunction(with_numpy, "halve")

    def forward(x):
        with Block(ipu_id=0):
            x = host(x * 2)
        with Block(ipu_id=1):
            return host(x) + host(x + 1)

    options = Options(
        engine="eager", device_iterations=4, workers=2, strategy=Strategy("pipelined")
    )
    x = torch.randn(8)
    assert torch.allclose(ipu_dynamo.compile_inference(forward, options)(x), x + 0.5)


def test_training_is_refused_with_the_line():
    model = Doubled(with_numpy)
    compiled = ipu_dynamo.compile_training(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Options(engine="eager"), loss=0
    )
    with pytest.raises(CompileError, match=r"halve has no gradient[^$]*self\.host\(self\.layer"):
        compiled(torch.randn(2, 3))


def test_saving_is_refused_by_name(tmp_path):
    compiled = ipu_dynamo.compile_inference(Doubled(with_numpy), Options(engine="eager"))
    compiled(torch.randn(2, 3))
    message = r"the host function halve(/\d+)? is Python of"  # older ones may still be alive
    with pytest.raises(ipu_dynamo.SavedProgramError, match=message):
        ipu_dynamo.save(compiled, tmp_path / "program")


def test_no_cache_keeps_such_a_program(tmp_path):
    for factor in (2, 3):
        model = Doubled(lambda x, by=factor: x / by)
        options = Options(engine="eager", program_cache=str(tmp_path))
        x = torch.randn(2, 3)
        found = ipu_dynamo.compile_inference(model, options)(x)
        expected = torch.relu(model.layer(x).tanh() * 2 / factor) + 1
        assert torch.allclose(found, expected)
    assert not list(tmp_path.glob("*.program"))


def test_other_shapes_than_when_compiling_are_an_error_with_the_line():
    def varying(x):
        return x[: 1 + int(x.sum() == 0)]

    compiled = ipu_dynamo.compile_inference(Doubled(varying), Options(engine="eager"))
    with pytest.raises(
        ExecutionError, match=r"float32\[1,4\], and was float32\[2,4\][^$]*self\.host"
    ):
        compiled(torch.ones(2, 3))


def test_functions_of_one_name_stay_apart():
    first, second = register("twin", lambda x: x), register("twin", lambda x: x)
    assert {first.name, second.name} == {"twin", "twin/1"}


@pytest.mark.parametrize(
    ("function", "kind"),
    [(lambda x: x.numpy() / 2, "ndarray"), (lambda x: (x, [torch.float32]), "dtype")],
)
def test_results_of_other_types_are_refused_with_the_line(function, kind):
    compiled = ipu_dynamo.compile_inference(Doubled(function), Options(engine="eager"))
    with pytest.raises(CompileError, match=rf"halve returned a {kind}[^$]*self\.host\(self\.layer"):
        compiled(torch.ones(2, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: {"other" if x.any() else "key": x},
        lambda x: (x, "some" if x.any() else None),
    ],
)
def test_a_result_that_is_no_tensor_has_the_value_of_the_compilation(function):
    host = HostFunction(function, "read")

    def forward(x):
        return x + 1, host(x)

    compiled = ipu_dynamo.compile_inference(forward, Options(engine="eager"))
    with pytest.raises(ExecutionError, match=r"the host function read returned .* when compiling"):
        compiled(torch.ones(2))
