"""Check that a loss in the loop of a serialised product is the loss of the whole product."""

import copy

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from ipu_dynamo import (
    BeginBlock,
    Options,
    Strategy,
    compile_inference,
    compile_training,
    serialized_matmul,
)
from ipu_dynamo.ops.serialized_loss import (
    serialized_loss,
    serialized_loss_backward,
    serialized_loss_backward_,
)
from ipu_dynamo.passes.level_text import write_level
from ipu_dynamo.testing import assert_close, assert_same_training
from tests.models_of_heads import Head
from tests.properties.evaluate import captured, check, evaluate, lines_of, named_inputs
from tests.properties.running import EAGER_FIRST

EAGER = {"engine": "eager"}
LOOPS = ("input_channels", "output_channels")


@st.composite
def heads(draw):
    """Settings of a head; classes 0 and 3 are ignored, or nothing is."""
    mode = draw(st.sampled_from(LOOPS))
    return {
        "mode": mode,
        "factor": draw(st.integers(1, 6 if mode == "input_channels" else 12)),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "ignore_index": draw(st.sampled_from([-100, 0, 3])),
        "padding": draw(st.sampled_from([None, 0, 5])),
        "tied": draw(st.booleans()),
    }


def data(count=1, seed=0):
    """Tokens and targets of some micro-batches of two sequences of three."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(12, (2 * count, 3), generator=generator) for _ in range(2))
    targets[0, 0] = 1  # some target counts, whatever is ignored
    return tokens, targets


@given(heads(), st.sampled_from([1, 3]))
def test_keeps_values_and_metadata(settings, count):
    """With more rows than classes, and with fewer: the loop goes over the larger dimension."""
    torch.manual_seed(0)
    model, batch, rows = Head(**settings).double(), data(count), 6 * count
    inputs = named_inputs(model, batch)
    capture, one = captured(model, batch, Options(), before="SerializeLoss")
    before, lines = evaluate(capture, inputs), lines_of(capture.graph.graph.nodes)
    assert one(capture)
    note(str(capture.graph.graph))
    check(capture)
    assert_close(evaluate(capture, inputs), before, rtol=1e-12, atol=1e-12)
    assert lines_of(capture.graph.graph.nodes) <= lines
    nodes = [n for n in capture.graph.graph.nodes if n.op == "call_function"]
    assert all(n.meta.get("stack_trace") for n in nodes if n.all_input_nodes)
    assert {serialized_loss, serialized_loss_backward} <= {n.target for n in nodes}
    loops = [n for n in nodes if n.target in (serialized_loss, serialized_loss_backward)]
    assert all(LOOPS[rows < 12] in n.args for n in loops)
    assert not [
        n
        for n in nodes
        if getattr(n.meta["val"], "shape", ())[-1:] == (12,)
        and len(n.meta["val"].shape) == 2
        and n.meta["val"].shape[0] == rows
    ]
    text = write_level(capture)
    assert not one(capture)
    assert write_level(capture) == text


@pytest.mark.parametrize("engine", EAGER_FIRST)
@given(
    settings=heads(),
    accumulation=st.integers(1, 3),
    replicas=st.integers(1, 2),
    strategy=st.sampled_from(["post", "running"]),
)
def test_trains_as_plain_pytorch(engine, settings, accumulation, replicas, strategy):
    torch.manual_seed(0)
    options = {
        "engine": engine,
        "gradient_accumulation": accumulation,
        "replicas": replicas,
        "mean_strategy": strategy,
    }
    calls = [data(accumulation * replicas, seed) for seed in range(2)]
    model = Head(**settings).double()
    loss = (lambda value: value.sum()) if settings["reduction"] == "none" else None
    # The running mean weighs micro-batches by float32 numbers.
    assert_same_training(model, calls, options, loss=loss, rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("mode", LOOPS)
def test_no_logits_and_no_gradient_of_the_weight_are_computed(mode):
    model = Head(mode, 3, classes=77)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_training(model, optimizer, EAGER)
    step.compile(*data())
    functions = step.executable.host_program.inlined.functions
    values = [n.meta["val"] for f in functions for n in f.operators]
    shapes = [tuple(v.shape) for v in values if isinstance(v, torch.Tensor)]
    assert (6, 77) not in shapes
    targets = [n.target for f in functions for n in f.operators]
    assert serialized_loss_backward_ in targets
    assert torch.ops.aten.embedding_dense_backward.default not in targets
    assert (77, 4) not in shapes
    assert torch.ops.ipu.accumulate_rows.default in targets


@pytest.mark.parametrize("mode", LOOPS)
def test_a_pipeline_trains_as_plain_pytorch(mode):
    torch.manual_seed(0)
    model = Head(mode, 2).double()
    BeginBlock(model.layer, ipu_id=1)
    options = Options(engine="eager", gradient_accumulation=4, strategy=Strategy(kind="pipelined"))
    step = assert_same_training(model, [data(4)], options, rtol=1e-10, atol=1e-10)
    assert step.program.num_stages == 2


@pytest.mark.parametrize("mode", LOOPS)
def test_inference_has_no_logits_either(mode):
    model = Head(mode, 3).double()
    compiled = compile_inference(model, EAGER)
    assert_close(compiled(*data()), model(*data()), rtol=1e-12)
    targets = [n.target for n in compiled.program.functions[0].operators]
    assert serialized_loss in targets


@pytest.mark.parametrize("mode", LOOPS)
@pytest.mark.parametrize("keep_precision", [False, True])
def test_half_precision_is_near_float64(mode, keep_precision):
    torch.manual_seed(0)
    model = Head(mode, 4, keep_precision=keep_precision).half()
    exact = copy.deepcopy(model).double()
    exact(*data()).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = compile_training(model, optimizer, EAGER)(*data())
    assert_close(loss.double(), exact(*data()).detach(), rtol=2e-3)
    for name, parameter in exact.named_parameters():
        update = before[name].double() - model.get_parameter(name).detach().double()
        assert_close(update, parameter.grad, name, rtol=5e-3, atol=2e-3)


def test_the_gradient_of_the_weight_lies_as_its_views_say():
    capture, one = captured(
        Head("output_channels", 2, tied=False), data(), Options(), before="SerializeLoss"
    )
    assert one(capture)
    nodes = [n for n in capture.graph.graph.nodes if n.target is torch.ops.aten.t.default]
    for node in nodes:
        assert node.meta["val"].stride() == node.args[0].meta["val"].t().stride()


def test_logits_that_somebody_else_reads_are_whole():
    model = Head("output_channels", 3, logits=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = compile_training(model, optimizer, EAGER)
    assert_close(step(*data()), model(*data()), rtol=1e-12)
    targets = [n.target for n in step.program.functions[0].operators]
    assert serialized_loss not in targets
    assert torch.ops.aten.cat.default in targets


@pytest.mark.parametrize("mode", LOOPS)
def test_a_target_that_does_not_exist_is_an_error(mode):
    tokens, targets = data()
    targets[1, 1] = 12
    with pytest.raises(Exception, match="Target 12 is out of bounds"):
        compile_inference(Head(mode, 3), EAGER)(tokens, targets)


@pytest.mark.parametrize("mode", LOOPS)
@pytest.mark.parametrize(
    "used", [lambda w: w + w, lambda w: w.transpose(1, -1), lambda w: w.transpose(0, 1), torch.t]
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_weight_that_is_doubled_or_turned_gets_its_whole_gradient(mode, used, count):
    class Square(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w = torch.nn.Parameter(torch.randn(12, 12))

        def forward(self, x, targets):
            logits = serialized_matmul(x, used(self.w), mode, 3)
            return torch.nn.functional.cross_entropy(logits, targets)

    x, targets = torch.randn(4 * count, 12), torch.randint(12, (4 * count,))
    options = Options("eager", gradient_accumulation=count)
    assert_same_training(Square(), [(x, targets)] * 2, options)
