"""Check what users read when a model cannot be compiled."""

import copy
import re
import traceback

import pytest
import torch
from torch import nn

import poptorch
from poptorch.tracebacks import WhileTracing
from tests.poptorch.executor.models import Classifier, batch


def own_error(x):
    raise ValueError("Hi")


def test_an_error_of_the_users_code_keeps_its_text_and_ends_at_its_line():
    with pytest.raises(ValueError, match=r"^Hi$") as caught:
        poptorch.inferenceModel(own_error)(torch.ones(1))
    assert caught.value.__cause__ is None
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "own_error"
    assert len(frames) <= 6


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.scatter(0, x, x, None),
        lambda x: x.scatter_(0, x, x, "add"),
        lambda x: x.scatter(0, x, 5.0, "multiply"),
        lambda x: x.reshape("a"),
    ],
)
def test_an_error_of_pytorch_has_the_text_of_eager(wrong):
    x = torch.zeros(2)
    with pytest.raises(TypeError) as eager:
        wrong(x)
    with pytest.raises(TypeError, match=f"^{re.escape(str(eager.value))}$") as compiled:
        poptorch.inferenceModel(wrong)(x)
    assert traceback.extract_tb(compiled.value.__traceback__)[-1].name == "<lambda>"


def test_the_cause_of_an_error_of_pytorch_names_line_operator_and_shapes():
    model = Classifier()
    x = batch(2)[0]
    with pytest.raises(RuntimeError) as caught:
        poptorch.trainingModel(model)(x, torch.rand(2))
    cause = caught.value.__cause__
    assert isinstance(cause, WhileTracing)
    assert "models.py:" in str(cause)
    assert "cross_entropy(out: float32[2, 3], y: float32[2]" in str(cause)
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 40


def test_a_shape_that_depends_on_values_is_no_item():
    with pytest.raises(poptorch.Error) as caught:
        poptorch.inferenceModel(lambda x: torch.nonzero(x))(torch.ones(3))
    assert "depends on its values, which is not known when compiling" in str(caught.value)
    assert "item" not in str(caught.value)
    assert "test_messages.py:" in str(caught.value)


def test_one_hot_needs_its_number_of_classes():
    with pytest.raises(poptorch.Error) as caught:
        poptorch.inferenceModel(lambda x: nn.functional.one_hot(x))(
            torch.ones(3, dtype=torch.int64)
        )
    text = str(caught.value)
    assert "OneHot num classes must be specified and must be constant." in text
    assert "num_classes=n" in text
    assert "test_messages.py:" in text


def test_another_models_optimizer_is_named():
    optimizer = poptorch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    executor = poptorch.trainingModel(Classifier(), None, optimizer)
    with pytest.raises(poptorch.Error, match="optimizer has 2 parameters, but none of Classifier"):
        executor(*batch(2))


def test_an_optimizer_from_before_a_layer_was_replaced_is_named(capsys):
    said = "has 2 parameters that are none of Classifier, and has not got "
    model = Classifier()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    (name, layer), *_ = ((n, m) for n, m in model.named_children() if isinstance(m, nn.Linear))
    setattr(model, name, nn.Linear(layer.in_features, layer.out_features))
    poptorch.trainingModel(model, None, optimizer)(*batch(2))
    assert f"{said}{name}.weight, {name}.bias, which" in capsys.readouterr().err
    model = Classifier()
    optimizer = poptorch.optim.SGD(getattr(model, name).parameters(), lr=0.1)  # the rest is frozen
    poptorch.trainingModel(model, None, optimizer)(*batch(2))
    assert "none of Classifier" not in capsys.readouterr().err


def test_a_misspelt_setter_leads_to_the_right_one():
    with pytest.raises(AttributeError, match=r"did you mean deviceIterations"):
        poptorch.Options().deviceIteration(4)


def test_attributes_that_came_later_are_named_once_with_the_devices_optimizer(capsys):
    model = Classifier()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, None, optimizer)
    optimizer.step = 0
    optimizer.defaults["mine"] = 1
    optimizer.param_groups[0]["initial_lr"] = 0.1
    executor.setOptimizer(optimizer)
    executor.setOptimizer(optimizer)
    text = capsys.readouterr().err
    for what, name in (
        ("default group variable", "mine"),
        ("optimizer attribute", "step"),
        ("group 0 attribute", "initial_lr"),
    ):
        assert text.count(f"Ignoring unexpected {what} in SGD2 optimizer: ['{name}']") == 1


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "No IO tiles allocated. You must allocate at least 32 IO tiles using poptorch.Opt"),
        (
            {"strategy": poptorch.PipelinedExecution()},
            "Overlapped IO is not supported with poptorch.PipelinedExecution. If you are using",
        ),
        (
            {"twice": True},
            "poptorch.set_overlap_for_input must be the only op applied to an input. This is not "
            "the case for input x to the model.",
        ),
    ],
)
def test_what_overlap_needs_is_said_in_poptorchs_words(changed, text):
    def forward(x):
        marked = poptorch.set_overlap_for_input(x, poptorch.OverlapMode.OverlapAccumulationLoop)
        return marked + x if changed.get("twice") else marked + 1

    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    options.setExecutionStrategy(changed.get("strategy", poptorch.ShardedExecution()))
    with pytest.raises(poptorch.Error, match=re.escape(text)):
        poptorch.inferenceModel(forward, options)(torch.ones(2))


class Pair(nn.Module):
    """Two square layers; `share` lets them have memory in common, or not."""

    def __init__(self, share):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.register_buffer("table", torch.ones(3))
        share(self)

    def forward(self, x):
        return poptorch.identity_loss(self.b(self.a(x)) + self.table, "mean")


def share_data(model):
    model.b.weight.data = model.a.weight.data


def share_transposed(model):
    model.b.weight.data = model.a.weight.data.t()


def share_buffer(model):
    model.table = model.a.weight.data[1]


def share_storage(model):
    model.a.weight.data, model.b.weight.data = torch.ones(6, 3).split(3)


@pytest.mark.parametrize("share", [share_data, share_transposed, share_buffer])
def test_trained_tensors_that_share_memory_are_refused_by_name(share):
    model = Pair(share)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    step = poptorch.trainingModel(model, optimizer=optimizer)
    with pytest.raises(poptorch.Error, match=r"a\.weight and (b\.weight|table) are two tensors"):
        step(torch.ones(2, 3))
    assert poptorch.inferenceModel(model)(torch.ones(2, 3)).isfinite()


def test_parts_of_one_storage_are_trained():
    model = Pair(share_storage)
    expected = copy.deepcopy(model)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    step = poptorch.trainingModel(model, optimizer=optimizer)
    step(torch.ones(2, 3))
    step.copyWeightsToHost()
    (expected.b(expected.a(torch.ones(2, 3))) + expected.table).mean().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - 0.1 * theirs.grad)
