"""Check names and anchors of tensors; `test_plain_loop.py` checks what anchors hold."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from tests.poptorch.executor.models import Classifier, batch

MODES = poptorch.OutputMode


class Net(nn.Module):
    """Linear layers in containers, a normalisation, a name scope, an operator called twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
        self.norm = nn.BatchNorm1d(4)
        self.loss = nn.MSELoss()

    def forward(self, x, y):
        with poptorch.NameScope("twice"):
            x = torch.relu(torch.relu(self.layers(x)))
        return self.loss(self.norm(x), y)


def trained(model=None, options=None, optimizer=poptorch.optim.AdamW):
    model = model or Net()
    executor = poptorch.trainingModel(model, options, optimizer(model.parameters(), lr=0.1))
    executor(torch.randn(4, 4), torch.randn(4, 4))
    return executor


def test_names_are_those_of_modules_operators_and_their_variables():
    names = trained().getTensorNames()
    assert names == sorted(set(names))
    assert set(names) >= {
        "layers.0.weight",
        "norm.running_mean",
        "input",
        "input/1",
        "twice/layers/0/MatMul:0",
        "twice/layers/0/Add:0",
        "twice/layers/1/Relu:0",
        "twice/layers/2/MatMul:0",
        "twice/Relu:0",
        "twice/Relu:0/1",
        "norm/BatchNormalization:0",
        "loss/MseLoss:0",
        "Gradient___layers.0.bias",
        "Gradient___twice/layers/0/MatMul:0",
        "Gradient___twice/Relu:0/1",
        "UpdatedVar___layers.2.weight",
        "Accl1___layers.0.weight",
        "Step___norm.bias",
        "learningRate___specific___layers.0.weight",
    }
    assert not {"layers.2.bias", "Gradient___input", "UpdatedVar___norm.running_mean"} & set(names)
    assert not {"lossScaling_FLOAT", "weightDecay___specific___norm.bias"} & set(names)  # constants


def test_an_update_without_state_has_numbers():
    names = trained(optimizer=torch.optim.SGD).getTensorNames()
    assert "scaledLearningRate0___specific___norm.bias" in names
    assert "weightDecayScaleFactor0___specific___norm.bias" in names


def test_names_leave_modules_out_where_they_are_asked_to():
    names = trained(options=poptorch.Options().disableModuleNamescope()).getTensorNames()
    assert {"twice/MatMul:0", "twice/MatMul:0/1", "BatchNormalization:0"} <= set(names)
    assert not [name for name in names if "layers/" in name]


def test_a_weight_that_is_computed_is_not_listed():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    executor = poptorch.inferenceModel(model)
    executor(torch.randn(2, 4))
    names = executor.getTensorNames()
    assert "0.weight" not in names
    assert "0.parametrizations.weight.original0" in names


def test_an_inference_has_no_gradients_nor_updates():
    executor = poptorch.inferenceModel(Classifier())
    executor(batch(2)[0])
    assert not [n for n in executor.getTensorNames() if n.startswith(("Gradient", "Updated"))]


def test_names_need_a_compiled_model():
    executor = poptorch.inferenceModel(Classifier())
    message = "^Model must be compiled before calling getTensorNames$"
    with pytest.raises(AssertionError, match=message):
        executor.getTensorNames()
    executor(batch(2)[0])
    executor.destroy()
    with pytest.raises(AssertionError, match=message):
        executor.getTensorNames()


@pytest.mark.parametrize("optimizer", [poptorch.optim.SGD, poptorch.optim.Adam, torch.optim.SGD])
def test_every_name_can_be_an_anchor(optimizer):
    names = trained(optimizer=optimizer).getTensorNames()
    options = poptorch.Options()
    for name in names:
        options.anchorTensor(f"my {name}", name)
    executor = trained(options=options, optimizer=optimizer)
    for name in names:
        assert isinstance(executor.getAnchoredTensor(f"my {name}"), torch.Tensor)


def test_an_anchor_has_its_own_mode_or_the_outputs():
    options = poptorch.Options().deviceIterations(2).outputMode(MODES.All)
    options.anchorTensor("as outputs", "input")
    options.anchorTensor("last", "input", MODES.Final)
    options.anchorTensor("never", "input", MODES.EveryN, 4)
    executor = trained(options=options)
    shapes = {s: tuple(executor.getAnchoredTensor(s).shape) for s in options.anchored_tensors}
    assert shapes == {"as outputs": (4, 4), "last": (2, 4), "never": (0, 4)}


def test_states_and_numbers_of_the_optimizer_have_modes_too():
    options = poptorch.Options().deviceIterations(2)
    options.anchorTensor("steps", "Step___norm.bias", MODES.All)
    options.anchorTensor("steps at the end", "Step___norm.bias")
    options.anchorTensor("rate", "learningRate___specific___norm.bias", MODES.All)
    executor = trained(options=options)
    assert executor.getAnchoredTensor("steps").tolist() == [0, 1]
    assert executor.getAnchoredTensor("steps at the end").tolist() == 2
    torch.testing.assert_close(executor.getAnchoredTensor("rate"), torch.tensor([0.1, 0.1]))


def test_a_velocity_is_known_at_the_end_of_a_call_only():
    options = poptorch.Options()
    options.anchorTensor("velocity", "Accl___first.weight", MODES.All)
    model = Classifier()
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.5, use_combined_accum=True
    )
    executor = poptorch.trainingModel(model, options, optimizer)
    with pytest.raises(poptorch.Error, match=r"velocity: Accl___first\.weight can be had as it is"):
        executor.compile(*batch(2))
    assert not executor.isCompiled()


@pytest.mark.parametrize(
    "name",
    ["fc3.weight", "Gradient___input", "Gradient___first.weights", "UpdatedVar___x", "input/2"],
)
def test_a_tensor_that_does_not_exist_is_refused_when_compiling(name):
    options = poptorch.Options()
    options.anchorTensor("mine", name)
    executor = poptorch.trainingModel(Classifier(), options)
    with pytest.raises(poptorch.Error, match="anchor mine: there is no"):
        executor.compile(*batch(2))
    assert not executor.isCompiled()


def test_a_state_that_does_not_exist_is_refused_when_compiling():
    options = poptorch.Options()
    options.anchorTensor("mine", "Accl2___first.weight")
    executor = poptorch.trainingModel(Classifier(), options)
    with pytest.raises(poptorch.Error, match=r"the program has no tensor Accl2___first\.weight"):
        executor.compile(*batch(2))


def test_unknown_anchors_and_those_before_a_call_are_assertion_errors():
    options = poptorch.Options()
    options.anchorTensor("mine", "input")
    executor = poptorch.inferenceModel(Classifier(), options)
    rows = batch(2)[0]
    for prepare in (lambda: None, lambda: executor.compile(rows)):
        prepare()
        with pytest.raises(AssertionError, match=r"^No tensor with name mine found\.$"):
            executor.getAnchoredTensor("mine")
    executor(rows)
    assert torch.equal(executor.getAnchoredTensor("mine"), rows)
    with pytest.raises(AssertionError, match=r"^No tensor with name input found\.$"):
        executor.getAnchoredTensor("input")


def test_an_anchor_is_logged_with_its_mode(caplog):
    options = poptorch.Options().deviceIterations(2)
    options.anchorTensor("a", "Gradient___norm.bias", MODES.EveryN, 2)
    options.anchorTensor("b", "input", MODES.Sum, 5)
    options.anchorTensor("c", "input/1")
    logger = logging.getLogger("poptorch::python")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, "poptorch::python"):
            trained(options=options)
    finally:
        logger.removeHandler(caplog.handler)
    lines = [line for line in caplog.messages if line.startswith("anchor (")]
    assert lines == [
        "anchor ( Gradient___norm.bias EVERYN/2 )",
        "anchor ( input Sum/1 )",
        "anchor ( input/1 FINAL/1 )",
    ]


def test_a_value_that_is_changed_in_place_is_the_one_before():
    class Changed(nn.Module):
        def forward(self, x):
            y = x + 1
            z = y * 1
            y.add_(1)
            return y + z

    options = poptorch.Options()
    options.anchorTensor("before", "Add:0")
    options.anchorTensor("after", "Add:0/1")
    executor = poptorch.inferenceModel(Changed(), options)
    assert executor(torch.zeros(2)).tolist() == [3, 3]
    assert executor.getAnchoredTensor("before").tolist() == [1, 1]
    assert executor.getAnchoredTensor("after").tolist() == [2, 2]


def test_an_input_that_is_changed_in_place_is_the_one_before():
    class Changed(nn.Module):
        def forward(self, x):
            x.mul_(2)
            return x + 1

    options = poptorch.Options()
    options.anchorTensor("before", "input")
    executor = poptorch.inferenceModel(Changed(), options)
    x = torch.ones(2)
    assert executor(x).tolist() == [3, 3]
    assert executor.getAnchoredTensor("before").tolist() == [1, 1]


def test_anchors_of_a_pipeline_are_those_of_one_ipu():
    values = []
    for second in (None, 1):
        model = Classifier(second)
        options = poptorch.Options().deviceIterations(2)
        options.Training.gradientAccumulation(4)
        names = ["input", "Relu:0", "Gradient___second/Add:0", "Gradient___first.weight"]
        for name in names:
            options.anchorTensor(name, name, MODES.All)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        executor = poptorch.trainingModel(model, options, optimizer)
        executor(*batch(16))
        values.append([executor.getAnchoredTensor(name) for name in names])
    assert all(map(torch.equal, *values))


def test_a_large_gradient_goes_on_being_added_where_it_is_computed():
    """A product that adds itself to its accumulator rounds once, also beside an anchor."""

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(200, 200)

        def forward(self, x, y):
            return F.mse_loss(self.fc(x), y)

    weights = []
    for anchored in (False, True):
        model, options = Large(), poptorch.Options()
        options.Training.gradientAccumulation(3)
        if anchored:
            options.anchorTensor("g", "Gradient___fc.weight", MODES.All)
        executor = poptorch.trainingModel(
            model, options, poptorch.optim.SGD(model.parameters(), lr=10.0)
        )
        torch.manual_seed(1)
        executor(torch.randn(30, 200), torch.randn(30, 200))
        text = str(executor._core._compiled.host.inlined)
        assert "accumulate_matmul" in text
        weights.append(model.fc.weight.detach().clone())
    assert torch.equal(*weights)
