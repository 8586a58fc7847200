"""Check loss scaling as PopTorch programs ask for it; the core's tests check what it computes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from ipu_dynamo import AutomaticLossScaling
from ipu_dynamo.options import OptionError
from poptorch.translate import core_options

SETTINGS = "automaticLossScalingSettings."


class Half(nn.Module):
    """The gradient of its half weight is the input, in half precision."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 2, dtype=torch.float16))

    def forward(self, x):
        return poptorch.identity_loss(F.linear(x, self.weight).float(), "sum")


def options_with(**settings):
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.Training.setAutomaticLossScaling(True)
    for name, value in settings.items():
        options._Popart.set(SETTINGS + name, value)
    return options


def scaled_loss(executor):
    return executor._core.loss_scale


def test_settings_reach_the_core():
    asked = options_with(
        binEdgeLocation=0.25,
        thresholdUpperCountProportion=0.5,
        updatePeriod=3,
        gradientTensorTrackingMethod=1,
    )
    found = core_options(asked, training=True).automatic_loss_scaling
    assert found == AutomaticLossScaling(0.25, 0.5, 3, "products")
    assert core_options(options_with(), training=True).automatic_loss_scaling == (
        AutomaticLossScaling()
    )
    assert core_options(poptorch.Options(), training=True).automatic_loss_scaling is None
    assert core_options(options_with(), training=False).automatic_loss_scaling is None


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"gradientTensorTrackingMethod": 2}, poptorch.Error, "TrackingMethod is 2: choose 0"),
        ({"binEdgeLocation": 1.5}, OptionError, "edge is 1.5"),
        ({"updatePeriod": 0}, OptionError, "period is 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        core_options(options_with(**settings), training=True)


def test_the_scale_follows_and_weights_do_not_change():
    weights = []
    for options in (options_with(), poptorch.Options().showCompilationProgressBar(False)):
        model = Half()
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, loss_scaling=4.0)
        executor = poptorch.trainingModel(model, options, optimizer)
        executor(torch.ones(1, 2).half())
        executor(torch.ones(1, 2).half())
        weights.append(model.weight.tolist())
        scale = scaled_loss(executor)
        weights.append(scale)
    assert weights == [[[-1.0, -1.0]], 16.0, [[-1.0, -1.0]], 4.0]


def test_a_model_without_half_gradients_is_refused():
    model = Half().float()
    executor = poptorch.trainingModel(model, options_with())
    with pytest.raises(
        poptorch.Error, match=r"No tracked gradient tensors of type fp16 were found\."
    ):
        executor(torch.ones(1, 2))


@pytest.mark.parametrize("automatic", [True, False])
def test_another_loss_scaling_keeps_what_is_automatic(automatic):
    model = Half()
    options = options_with() if automatic else poptorch.Options().showCompilationProgressBar(False)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, loss_scaling=2.0)
    executor = poptorch.trainingModel(model, options, optimizer)
    executor(torch.ones(1, 2).half())
    assert scaled_loss(executor) == (4.0 if automatic else 2.0)
    optimizer.loss_scaling = 8.0
    executor.setOptimizer(optimizer)
    assert scaled_loss(executor) == (16.0 if automatic else 8.0)
    executor(torch.ones(1, 2).half())
    assert model.weight.tolist() == [[-1.0, -1.0]]


def test_a_loss_scaling_that_was_not_given_is_constant():
    model = Half()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5)
    executor = poptorch.trainingModel(
        model, poptorch.Options().showCompilationProgressBar(False), optimizer
    )
    executor(torch.ones(1, 2).half())
    optimizer.loss_scaling = 8.0
    with pytest.raises(poptorch.Error, match="Values are constant but do not match"):
        executor.setOptimizer(optimizer)


def test_the_scale_of_the_last_step_can_be_anchored():
    options = options_with()
    options.deviceIterations(3)
    options.anchorTensor("scale", "finalLossScale")
    model = Half()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, loss_scaling=2.0)
    executor = poptorch.trainingModel(model, options, optimizer)
    for used in (8.0, 64.0):
        executor(torch.ones(3, 2).half())
        assert executor.getAnchoredTensor("scale") == used


def test_the_scale_of_every_step_can_be_anchored():
    options = options_with()
    options.deviceIterations(3)
    options.anchorTensor("scale", "finalLossScale", poptorch.OutputMode.All)
    options.anchorTensor("gradient", "Gradient___weight", poptorch.OutputMode.All)
    model = Half()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, loss_scaling=2.0)
    executor = poptorch.trainingModel(model, options, optimizer)
    executor(torch.ones(3, 2).half())
    assert executor.getAnchoredTensor("scale").tolist() == [2, 4, 8]
    assert executor.getAnchoredTensor("gradient").tolist() == [[2, 2], [4, 4], [8, 8]]


def test_there_is_no_scale_that_follows_without_automatic_loss_scaling():
    options = options_with()
    options.Training.setAutomaticLossScaling(False)
    options.anchorTensor("scale", "finalLossScale")
    with pytest.raises(poptorch.Error, match="no tensor finalLossScale without automatic"):
        poptorch.trainingModel(Half(), options)(torch.ones(1, 2).half())
