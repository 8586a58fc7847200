"""Check the joint graph: its gradients, its roles, and the models that have none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import CompileError, Options, compile_inference, compile_training
from ipu_dynamo.capture.capture import BACKWARD
from ipu_dynamo.testing import assert_close, assert_same_training
from tests.properties.evaluate import captured, check

EAGER = {"engine": "eager"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x, y):
        return F.mse_loss(self.second(self.norm(self.first(x))), y)


def differentiated(model, *args, start=1.0):
    options = Options(loss_scale=start)
    capture, _ = captured(model, args, options, before="SerializeLoss")
    check(capture)
    return capture


def batch():
    torch.manual_seed(0)
    return torch.randn(5, 3), torch.randn(5, 2)


def compiling(model):
    return compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER)


@pytest.mark.parametrize("start", [1.0, 8.0])
def test_gradients_are_autograds_times_the_start(start):
    model, (x, y) = Net(), batch()
    capture = differentiated(model, x, y, start=start)
    values = [
        capture.report.tensors.get(p.name, {"x": x, "y": y}.get(p.name))
        for p in capture.placeholders
    ]
    with torch.no_grad():
        given = [v.detach().clone() for v in values]
        results = torch.fx.Interpreter(capture.graph).run(*given, enable_io_processing=False)
    model(x, y).backward()
    gradients = {
        role.name: value
        for role, value in zip(capture.outputs, results, strict=True)
        if role.kind == "gradient"
    }
    expected = {name: parameter.grad * start for name, parameter in model.named_parameters()}
    assert_close(gradients, expected)


def test_graph_is_functional_and_says_what_belongs_to_the_backward_pass():
    capture = differentiated(Net(), *batch())
    for node in capture.graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable
            assert isinstance(node.meta[BACKWARD], bool)
    for node, role in zip(capture.returned, capture.outputs, strict=True):
        assert node.meta[BACKWARD] == (role.kind == "gradient")


def test_outputs_are_mutations_gradients_and_values():
    capture = differentiated(Net(), *batch())
    kinds = [role.kind for role in capture.outputs]
    assert [kinds.count(kind) for kind in ("mutation", "gradient", "value")] == [3, 6, 1]


def test_every_operator_keeps_a_source_line():
    capture = differentiated(Net(), *batch())
    lines = [
        n.meta.get("stack_trace") for n in capture.graph.graph.nodes if n.op == "call_function"
    ]
    assert all("forward" in (line or "") for line in lines)


def test_a_view_of_what_was_changed_in_place_keeps_a_source_line():
    def model(x):
        y = x * 2
        seen = y.view(-1)
        y += x
        return seen

    data = (torch.ones(2, 3),)
    capture, _ = captured(model, data, training=False, before="SerializeLoss")
    operators = [n for n in capture.graph.graph.nodes if n.op == "call_function"]
    assert operators[-1].target is torch.ops.aten.view.default
    assert all("model" in n.meta["stack_trace"] for n in operators)


def test_loss_of_several_elements_differentiates_their_sum():
    class Each(Net):
        def forward(self, x, y):
            return F.mse_loss(self.second(self.first(x)), y, reduction="none")

    assert_same_training(Each(), [batch()], EAGER, loss=0)


def test_frozen_parameter_has_no_gradient():
    model = Net()
    model.second.weight.requires_grad_(False)
    step = assert_same_training(model, [batch()] * 2, EAGER)
    assert "second.weight..grad" not in {v.name for v in step.program.variables}


def test_parameter_that_the_loss_does_not_reach_is_left_alone():
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(3, 3)

        def forward(self, x, y):
            self.unused(x)
            return super().forward(x, y)

    assert_same_training(Unused(), [batch()] * 2, EAGER)


def test_lstm_whose_input_needs_no_gradient_trains():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 2, batch_first=True)

        def forward(self, x, y):
            return F.mse_loss(self.lstm(x)[0], y)

    torch.manual_seed(0)
    data = [(torch.randn(2, 4, 3), torch.randn(2, 4, 2))] * 2
    assert_same_training(Model(), data, EAGER)


def test_attention_without_dropout_trains():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x, y):
            return F.mse_loss(self.layer(x), y)

    torch.manual_seed(0)
    assert_same_training(Model(), [(torch.randn(2, 3, 8), torch.randn(2, 3, 8))] * 2, EAGER)


def test_operator_without_result_stays_in_the_graph():
    class Model(nn.Module):
        def forward(self, i):
            torch._assert_async((i < 5).all(), "too large")
            return F.one_hot(i, 5)

    run = compile_inference(Model(), EAGER)
    assert torch.equal(run(torch.arange(3)), F.one_hot(torch.arange(3), 5))


# --- What is refused ---------------------------------------------------------------------------


def test_model_without_trainable_parameters_is_refused():
    model = Net().requires_grad_(False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(CompileError, match="has no parameter that requires a gradient"):
        compile_training(model, optimizer, EAGER)(*batch())


@pytest.mark.parametrize("stop", [lambda x: x.detach(), lambda x: x.round().int().float()])
def test_loss_that_reaches_no_parameter_is_refused_with_its_line(stop):
    class Stopped(Net):
        def forward(self, x, y):
            return F.mse_loss(stop(self.second(self.first(x))), y)

    message = r"depends on no parameter[\s\S]*%mse_loss[\s\S]*F.mse_loss\(stop"
    with pytest.raises(CompileError, match=message):
        compiling(Stopped())(*batch())


def test_integer_loss_is_refused():
    model = Net()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), EAGER, loss=0)
    model.forward = lambda x, y: (model.first(x) > 0).sum()
    with pytest.raises(
        CompileError, match=r"the loss has dtype torch\.int64, which has no gradient"
    ):
        step(*batch())


def test_parameter_changed_in_forward_is_refused_with_its_line():
    class Changed(Net):
        def forward(self, x, y):
            with torch.no_grad():
                self.first.weight.clamp_(-1, 1)
            return super().forward(x, y)

    with pytest.raises(CompileError, match=r"changes parameter first.weight in place[\s\S]*clamp_"):
        compiling(Changed())(*batch())


def test_changed_buffers_that_share_memory_are_refused():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("all", torch.zeros(4))
            self.register_buffer("some", self.all[:2])

        def forward(self, x):
            self.all.add_(1)
            return x + self.some

    with pytest.raises(CompileError, match="changes all, which shares its memory with some"):
        compile_inference(Shared(), EAGER)(torch.ones(2))
