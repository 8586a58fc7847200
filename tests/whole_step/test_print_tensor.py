"""Check that models print the tensors that they compute, in one order, and compute the same."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ipu_dynamo
from ipu_dynamo import (
    BeginBlock,
    ExecutionError,
    Options,
    Strategy,
    compile_inference,
    compile_training,
    print_tensor,
)
from ipu_dynamo.ops.tensor_text import TensorFormat, tensor_text
from ipu_dynamo.program import Program

ENGINES = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]
FULL = TensorFormat(0, digits=6, float_format="scientific")
FORM = {"summarise_threshold": 0, "digits": 6, "float_format": "scientific"}


class Net(nn.Module):
    """Two layers that print what is between them, and a weight, and the loss."""

    def __init__(self, *, prints=True):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)
        self.prints = prints

    def print(self, x, title):
        return print_tensor(x, title, **FORM) if self.prints else x

    def forward(self, x, y):
        h = self.print(self.first(x), "h")
        weight = self.print(self.second.weight, "weight")
        loss = F.mse_loss(F.linear(torch.tanh(h), weight, self.second.bias), y)
        return self.print(loss, "loss")


class Noting(Net):
    """The same in plain PyTorch, which keeps what is printed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def print(self, x, title):
        x = x.view_as(x)
        x.register_hook(lambda grad: self.seen.append((f"{title}_gradient", grad.clone())))
        self.seen.append((title, x.detach().clone()))
        return x


class Two(nn.Module):
    """Layers on two IPUs, which print what each makes."""

    def __init__(self, *, prints=True):
        super().__init__()
        self.first = BeginBlock(nn.Linear(2, 3), ipu_id=0)
        self.second = BeginBlock(nn.Linear(3, 2), ipu_id=1)
        self.prints = prints

    def forward(self, x, y):
        h = torch.tanh(self.first(x))
        h = print_tensor(h, "h", **FORM) if self.prints else h
        z = self.second(h)
        z = print_tensor(z, "z", **FORM) if self.prints else z
        return F.mse_loss(z, y)


def trained(model, options, rows, calls=1):
    """A model after some steps, and what these returned."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, options)
    generator = torch.Generator().manual_seed(1)
    losses = [
        step(
            torch.randn(rows, 2, generator=generator),
            torch.randn(rows, model.second.out_features, generator=generator),
        )
        for _ in range(calls)
    ]
    return step, losses


def made(kind, **settings):
    torch.manual_seed(0)
    return kind(**settings)


def titles(text):
    return re.findall(r"^(\w+):", text, re.MULTILINE)


@pytest.mark.parametrize("engine", ENGINES)
def test_prints_the_values_and_gradients_of_each_micro_batch(engine, capfd):
    trained(made(Net), Options(device_iterations=2, gradient_accumulation=2, engine=engine), 8)
    printed = capfd.readouterr().err
    model = made(Noting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 2, generator=generator), torch.randn(8, 1, generator=generator)
    for k, (rows, targets) in enumerate(zip(x.split(2), y.split(2), strict=True)):
        model(rows, targets).backward()
        if k % 2:
            for parameter in model.parameters():
                parameter.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
    names = ["h", "weight", "loss", "weight_gradient", "h_gradient"]
    assert titles(printed) == names * 4
    per_micro_batch = [model.seen[i : i + 6] for i in range(0, 24, 6)]
    wanted = [dict(seen)[name] for seen in per_micro_batch for name in names]
    bodies = re.split(r"^\w+:", printed, flags=re.MULTILINE)[1:]
    for body, tensor in zip(bodies, wanted, strict=True):
        numbers = [float(one) for one in re.findall(r"[-+.e\d]+", body)]
        torch.testing.assert_close(torch.tensor(numbers).view(tensor.shape), tensor.detach())


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_order_is_that_of_micro_batches_then_replicas_for_any_number_of_workers(workers, capfd):
    options = Options(
        device_iterations=2,
        gradient_accumulation=4,
        replicas=2,
        strategy=Strategy("pipelined"),
        workers=workers,
        engine="eager",
    )
    step, _ = trained(made(Two), options, 32)
    printed = capfd.readouterr().err
    assert titles(printed) == ["h", "z", "z_gradient", "h_gradient"] * 16
    (h,) = (o for o in step.program.outputs if o.printing and o.printing.title == "h")
    assert h.type.shape == (2, 3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 2, generator=generator)
    with torch.no_grad():
        first = [torch.tanh(made(Two).first(rows)) for rows in x[:16].split(2)]
    found = [part for part in re.split(r"^(?=h:)", printed, flags=re.MULTILINE) if part]
    for text, wanted in zip(found, first, strict=False):  # those before the first update
        assert text.startswith(f"h: {tensor_text(wanted, FULL)}\n")


@pytest.mark.parametrize("kind", [Net, Two])
@pytest.mark.parametrize("recompute", ["off", "all"])
def test_all_else_has_the_same_bits(kind, recompute):
    options = Options(gradient_accumulation=3, recompute=recompute, engine="eager")
    with_prints, losses = trained(made(kind), options, 6, calls=3)
    without, expected = trained(made(kind, prints=False), options, 6, calls=3)
    assert all(map(torch.equal, losses, expected))
    for one, other in zip(with_prints.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)
    homes = {v.name: v.ipu for v in without.program.variables}
    assert {v.name: v.ipu for v in with_prints.program.variables} == homes


def test_what_nobody_reads_is_not_printed(capfd):
    def forward(x):
        print_tensor(x + 1, "unread")
        return print_tensor(x, "read") + 1

    compile_inference(forward, {"engine": "eager"})(torch.zeros(1))
    assert capfd.readouterr().err == "read: (0.000)\n"


def test_without_a_title_a_tensor_has_its_name(capfd):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            x = print_tensor(x)
            return print_tensor(self.layer(x)) + print_tensor(self.layer.bias)

    compile_inference(Model(), {"engine": "eager"})(torch.zeros(1, 1))
    assert titles(
        capfd.readouterr().err.replace("/", "_").replace(".", "_").replace("d:0", "d")
    ) == [
        "x",
        "layer_Add",
        "layer_bias",
    ]


def test_a_gradient_is_printed_only_where_it_is_wanted(capfd):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x):
            return print_tensor(self.layer(x), "scores", print_gradient=False).sum()

    model = Model()
    step = compile_training(
        model, torch.optim.SGD(model.parameters(), lr=1.0), {"engine": "eager"}, loss=0
    )
    step(torch.ones(1, 2))
    assert titles(capfd.readouterr().err) == ["scores"]


def test_what_was_computed_before_an_error_is_printed(capfd):
    def forward(x):
        return torch.log(print_tensor(x, "x")).sqrt()

    options = Options(device_iterations=3, floating_point_exceptions=True, engine="eager")
    run = compile_inference(forward, options)
    with pytest.raises(ExecutionError):
        run(torch.tensor([2.0, 0.0, 3.0]))
    assert capfd.readouterr().err == "x: (2.000)\n"
    run(torch.tensor([2.0, 3.0, 4.0]))
    assert titles(capfd.readouterr().err) == ["x"] * 3


def test_does_nothing_outside_a_program(capfd):
    x = torch.ones(1, requires_grad=True)
    assert print_tensor(x, "x") is x
    assert capfd.readouterr().err == ""


def test_a_saved_program_prints(tmp_path, capfd):
    step, _ = trained(made(Net), Options(engine="eager"), 2)
    first = capfd.readouterr().err
    ipu_dynamo.save(step, tmp_path / "net.ipu")
    x, y = torch.randn(2, 2), torch.randn(2, 1)
    step(x, y)
    here = capfd.readouterr().err
    ipu_dynamo.load(tmp_path / "net.ipu")(x, y)
    assert capfd.readouterr().err == here
    assert titles(first) == titles(here)


def test_a_program_of_the_cache_prints(tmp_path, capfd):
    options = Options(engine="eager", program_cache=str(tmp_path))
    printed = []
    for _ in range(2):
        step, _ = trained(made(Net), options, 2)
        printed.append(capfd.readouterr().err)
    assert step.parts.compiled.passes == ()
    assert printed[0] == printed[1]
    assert titles(printed[0])


def test_the_text_of_a_program_is_read_back():
    step, _ = trained(made(Net), Options(engine="eager"), 2)
    program = step.program
    assert Program.parse(program.text()) == program
    assert "print 'h'" in str(program)


# --- Through torch.compile ------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("again", [False, True])
def test_torch_compile_prints_once(engine, again, capfd):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def block(self, x):
            return torch.sin(print_tensor(torch.sin(self.layer(x)), "block"))

        def forward(self, x):
            x = checkpoint(self.block, x, use_reentrant=False) if again else self.block(x)
            return x.sum()

    torch._dynamo.reset()
    model = Model()
    torch.compile(model, backend="ipu", options={"engine": engine})(torch.ones(1, 2)).backward()
    assert titles(capfd.readouterr().err) == ["block", "block_gradient"]
    compiled = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(torch.ones(1, 2)).backward()
    torch.testing.assert_close(compiled, [p.grad for p in model.parameters()])


def test_torch_compile_prints_micro_batch_by_micro_batch(capfd):
    torch._dynamo.reset()
    model = made(Two)
    options = {"engine": "eager", "micro_batches": 3, "workers": 2}
    x = torch.randn(6, 2)
    torch.compile(model, backend="ipu", options=options)(x, torch.randn(6, 2)).backward()
    printed = capfd.readouterr().err
    names = ["h", "z"] * 3 + ["z_gradient", "h_gradient"] * 3
    assert titles(printed) == names
    found = [part for part in re.split(r"^(?=[hz])", printed, flags=re.MULTILINE) if part]
    with torch.no_grad():
        for rows, text in zip(x.split(2), found[:6:2], strict=True):
            assert text == f"h: {tensor_text(torch.tanh(model.first(rows)), FULL)}\n"
