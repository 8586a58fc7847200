"""Check that loops and branches compute what plain Python does, on both engines."""

import copy

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import (
    Block,
    CompileError,
    ExecutionError,
    Options,
    compile_inference,
    compile_training,
)
from ipu_dynamo.program import Program
from tests.control_flow.models import FORMS, ROWS, TRAINED, WIDTH, Loss, inputs, net

ENGINES = ["eager", "inductor"]
EACH = [("eager", (form,)) for form in FORMS] + [("inductor", tuple(FORMS))]
EACH_TRAINED = [("eager", (form,)) for form in TRAINED] + [("inductor", ("cond", "scan"))]
assert_close = torch.testing.assert_close


@pytest.mark.few(4)
@pytest.mark.parametrize(("engine", "forms"), EACH)
def test_inference_computes_what_python_does(engine, forms):
    model = net(*forms)
    run = compile_inference(model, Options(engine=engine))
    for x in inputs():
        with torch.no_grad():
            assert_close(run(x), model.plain(x))


@pytest.mark.few(2)
@pytest.mark.parametrize(("engine", "forms"), EACH_TRAINED)
def test_training_computes_what_python_does(engine, forms):
    model = Loss(net(*forms))
    other = Loss(copy.deepcopy(model.model), plain=True)
    step = compile_training(
        model, torch.optim.SGD(model.parameters(), lr=0.05), Options(engine=engine)
    )
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    for x in inputs():
        loss = step(x)
        expected = other(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert_close(loss, expected.detach())
    assert_close(dict(model.state_dict()), dict(other.state_dict()))


def test_programs_are_read_back():
    run = compile_inference(net(*FORMS), Options(engine="eager"))
    run.compile(inputs()[0])
    text = run.program.text()
    assert "body_" in text
    again = Program.parse(text)
    assert again == run.program
    assert again.text() == text


@pytest.mark.parametrize("engine", ENGINES)
def test_programs_are_saved_and_loaded(tmp_path, engine):
    run = compile_inference(net("nested"), Options(engine=engine))
    x = inputs()[0]
    expected = run(x)
    ipu_dynamo.save(run, tmp_path / "nested.ipu")
    (loaded,) = ipu_dynamo.load(tmp_path / "nested.ipu")(x)
    assert torch.equal(loaded, expected[0])


def test_the_count_is_in_no_size():
    def program(count: int) -> str:
        run = compile_inference(
            lambda x: ipu_dynamo.for_loop(count, lambda a: a * 0.5, [x]), Options(engine="eager")
        )
        run.compile(torch.ones(2))
        return run.program.text()

    assert len(program(10000)) == len(program(10)) + len("000")


def test_no_iteration_returns_copies():
    run = compile_inference(
        lambda x: ipu_dynamo.for_loop(0, lambda a: a + 1, [x])[0], Options(engine="eager")
    )
    x = torch.ones(2)
    assert torch.equal(run(x), x)


def test_loops_in_the_stages_of_a_pipeline():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = net("nested"), net("scan")

        def forward(self, x, plain=False):
            with Block("a", 0):
                (h,) = self.first.plain(x) if plain else self.first(x)
            with Block("b", 1):
                h, products, _ = self.last.plain(h) if plain else self.last(h)
                return ipu_dynamo.identity_loss(h.sum() + products.square().sum(), "none")

    model = Model()
    other = copy.deepcopy(model)
    step = compile_training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        Options(engine="eager", gradient_accumulation=4),
    )
    x = torch.cat(inputs() + inputs(1))
    losses = step(x)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    expected = [other(part, plain=True) for part in x.split(ROWS)]
    (torch.stack(expected).sum() / 4).backward()
    optimizer.step()
    assert_close(losses.flatten()[-1], expected[-1].detach())
    assert_close(dict(model.state_dict()), dict(other.state_dict()))
    assert step.program.num_stages == 2


def test_each_iteration_draws_anew():
    def forward(x):
        def body(count, row):
            (inner,) = ipu_dynamo.for_loop(2, lambda q: q + torch.rand(4), [torch.zeros(4)])
            drawn = torch.cond(
                count.sum() > 1, lambda: torch.rand(4) + 1, lambda: torch.rand(4) - 1, ()
            )
            return count + 1, (torch.rand(4), inner.clone(), drawn)

        _, drawn = torch._higher_order_ops.scan(body, x.sum(), x)
        return torch.rand(4), *drawn

    run = compile_inference(forward, Options(engine="eager"))
    numbers = torch.cat([t.flatten() for _ in range(2) for t in run(torch.zeros(3, 1))])
    assert len(numbers.unique()) == len(numbers) == 80
    assert Program.parse(run.program.text()) == run.program


def test_engines_draw_the_same():
    def forward(x):
        return ipu_dynamo.for_loop(3, lambda a: a + torch.rand(2), [x])[0]

    runs = [compile_inference(forward, Options(engine=engine, seed=3)) for engine in ENGINES]
    assert torch.equal(*[run(torch.zeros(2)) for run in runs])


def test_gradients_know_what_was_dropped():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1000))

        def forward(self, x):
            def body(total, row):
                kept = torch.dropout(self.w * row, 0.5, True)
                return total + kept, kept.clone()

            total, kept = torch._higher_order_ops.scan(body, torch.zeros(1000), x)
            return ipu_dynamo.identity_loss(total.sum(), "none"), kept

    model = Model()
    step = compile_training(
        model, torch.optim.SGD(model.parameters(), lr=1.0), Options(engine="eager")
    )
    _, kept = step(torch.ones(4, 1))
    assert torch.equal(model.w.detach(), 1 - kept.sum(0))
    shares = (kept > 0).float().mean(1)
    assert ((shares > 0.4) & (shares < 0.6)).all()
    assert not torch.equal(kept[0], kept[1])


def test_a_failing_operator_in_a_body_is_named():
    run = compile_inference(
        lambda x, i: ipu_dynamo.for_loop(3, lambda a: x[a], [i])[0], Options(engine="eager")
    )
    with pytest.raises(ExecutionError, match=r"test_loops_in_programs\.py") as error:
        run(torch.arange(4), torch.tensor([9]))
    assert "aten.index" in str(error.value)


def _loop(body, *values):
    return lambda x: ipu_dynamo.for_loop(2, body, [x, *values])[0]


class Writes(nn.Module):
    """A loop that writes a parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return ipu_dynamo.for_loop(2, lambda a: self.w.add_(a), [x])[0]


BAD = {
    "shape": (_loop(lambda a: torch.cat([a, a])), "returns it as f32\\[4\\]"),
    "dtype": (_loop(lambda a: a.double()), "returns it as f64\\[2\\]"),
    "number": (_loop(lambda a, b: a, torch.ones(2)), "returns 1 tensors, and gets 2"),
    "no tensor": (_loop(lambda a: 3), "returns 3, which is no tensor"),
    "parameter": (Writes(), "changes a tensor from outside in place"),
    "branches": (
        lambda x: torch.cond(x.sum() > 0, lambda a: a, lambda a: a[:1], (x,)),
        "return \\(f32\\[2\\]\\) and \\(f32\\[1\\]\\)",
    ),
    "predicate": (
        lambda x: ipu_dynamo.cond(x > 0, lambda: x, [], lambda: x, [])[0],
        "a condition is one bool",
    ),
    "block": (_loop(lambda a: _in_block(a)), "begins or ends in the body"),
}


def _in_block(a):
    with Block("inside", 0):
        return a + 1


@pytest.mark.parametrize("case", BAD)
def test_bad_bodies_are_refused_with_their_line(case):
    model, problem = BAD[case]
    with pytest.raises(CompileError, match=problem) as error:
        compile_inference(model, Options(engine="eager"))(torch.ones(2))
    assert "test_loops_in_programs.py" in str(error.value)
    assert error.value.id == "control-flow"


def test_a_while_loop_is_not_trained():
    model = Loss(net("while_loop"))
    model.model.ours = lambda m, x: torch.while_loop(
        lambda y: y.sum() < 9, lambda y: (y + m.fc(y).exp(),), (x,)
    )[0]
    step = compile_training(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Options(engine="eager")
    )
    with pytest.raises(CompileError, match="a while_loop has no gradient") as error:
        step(torch.ones(ROWS, WIDTH))
    assert "test_loops_in_programs.py" in str(error.value)


def test_halves_in_a_body_are_computed_as_outside():
    model = nn.Linear(8, 8).half()

    def forward(x):
        return ipu_dynamo.for_loop(2, lambda a: model(a) * 0.3 + 0.1, [x])[0]

    run = compile_inference(forward, Options(engine="eager"))
    x = torch.randn(4, 8).half()
    with torch.no_grad():
        expected = model(model(x) * 0.3 + 0.1) * 0.3 + 0.1
        assert_close(run(x), expected)
    assert "_f32" in str(run.program)  # the product of a body is upcast like others


def test_without_a_program_a_loop_is_pythons():
    x = torch.ones(2)
    assert torch.equal(ipu_dynamo.for_loop(3, lambda a: a.add_(1), [x])[0], torch.full((2,), 4.0))
    assert torch.equal(x, torch.ones(2))
    (chosen,) = ipu_dynamo.cond(torch.tensor([False]), lambda: x, [], lambda a: a * 2, [x])
    assert torch.equal(chosen, x * 2)
