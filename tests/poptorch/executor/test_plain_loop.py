"""Check calls of drawn shapes, with anchors, against a plain loop in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from tests.poptorch.executor.plain_loop import Batching, Net, run

MODES = ["All", "EveryN", "Final", "Sum"]
OF_TRAINING = [
    "Gradient___fc1.weight",
    "Gradient___fc2.bias",
    "Gradient___fc2/Add:0",
    "UpdatedVar___fc1.weight",
    "UpdatedVar___fc2.bias",
]
OF_BOTH = [
    "input",
    "input/1",
    "fc1/Add:0",
    "fc1/MatMul:0",
    "fc2/Add:0",
    "fc1.weight",
    "fc2.bias",
    "seen",
]


@st.composite
def batchings(draw, *, training):
    replicas, size = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]))
    return Batching(
        iterations=draw(st.integers(1, 4)),
        accumulation=draw(st.integers(1, 3)) if training else 1,
        replicas=replicas,
        group_size=size,
        orthogonal=draw(st.booleans()),
        rows=draw(st.integers(1, 3)),
    )


@st.composite
def modes(draw, b):
    """An output mode and a period that fits."""
    mode = draw(st.sampled_from(MODES))
    periods = [n for n in range(1, b.iterations + 1) if b.iterations % n == 0]
    return mode, draw(st.sampled_from(periods)) if mode == "EveryN" else 1


def options_of(b, mode, period, settings):
    options = poptorch.Options().deviceIterations(b.iterations).replicationFactor(b.replicas)
    options.useIpuModel(True)  # for any number of IPUs
    options.broadcastBuffers(False)
    kind = poptorch.CommGroupType.Orthogonal if b.orthogonal else poptorch.CommGroupType.Consecutive
    options.inputReplicaGrouping(b.group_size, kind)
    options.outputMode(poptorch.OutputMode[mode], period)
    if settings["lr"] is None:
        return options
    options.Training.gradientAccumulation(b.accumulation)
    reduction = poptorch.ReductionType.Mean if settings["mean"] else poptorch.ReductionType.Sum
    options.Training.accumulationAndReplicationReductionType(reduction)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(settings["strategy"])
    return options


@st.composite
def trainings(draw):
    strategy = draw(st.sampled_from(list(poptorch.MeanReductionStrategy)))
    mean = draw(st.booleans())
    return {
        "lr": 0.05,
        "momentum": draw(st.sampled_from([0.0, 0.5])),
        "scale": draw(st.sampled_from([1.0, 8.0])),
        "mean": mean,
        "strategy": strategy,
        "early": mean and strategy == poptorch.MeanReductionStrategy.PostAndLoss,
        "loss": draw(st.sampled_from(["mean", "sum"])),
    }


def compare(data, b, settings):
    """Run two calls both ways, and compare what comes back and what is anchored."""
    training = settings["lr"] is not None
    torch.manual_seed(data.draw(st.integers(0, 9)))
    model = Net(settings["loss"]).train(training)
    calls = [(torch.randn(b.all_rows, 3), torch.randn(b.all_rows, 2)) for _ in range(2)]
    mode = data.draw(modes(b))
    options = options_of(b, *mode, settings)
    names = [*OF_BOTH, *(OF_TRAINING if training else [])]
    names = data.draw(st.lists(st.sampled_from(names), max_size=6))
    anchors = {f"anchor {i}": (name, data.draw(modes(b))) for i, name in enumerate(names)}
    for short, (name, (rule, period)) in anchors.items():
        options.anchorTensor(short, name, poptorch.OutputMode[rule], period)
    if training:
        optimizer = poptorch.optim.SGD(
            model.parameters(),
            lr=settings["lr"],
            momentum=settings["momentum"],
            loss_scaling=settings["scale"],
            use_combined_accum=False,
        )
        executor = poptorch.trainingModel(model, options, optimizer)
    else:
        executor = poptorch.inferenceModel(model, options)
    twin = Net(settings["loss"]).train(training)
    twin.load_state_dict(model.state_dict())
    for (x, y), expected in zip(calls, run(twin, calls, b, settings), strict=True):
        returned = executor(x, y)
        (out, (double, seven)), loss = returned["outs"], returned["loss"]
        assert seven == 7
        for name, value in {"out": out, "double": double, "loss": loss}.items():
            close(value, expected[name].joined(b, *mode), name)
        for short, (name, rule) in anchors.items():
            close(executor.getAnchoredTensor(short), expected[name].joined(b, *rule), name)
    for name, parameter in model.named_parameters():
        close(parameter.detach(), twin.get_parameter(name).detach(), name)


def close(value, expected, name):
    assert (value.dtype, value.shape) == (torch.float32, expected.shape), name
    torch.testing.assert_close(value.double(), expected.double(), rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.examples(40)
@given(data=st.data())
def test_training_is_that_of_a_plain_loop(data):
    compare(data, data.draw(batchings(training=True)), data.draw(trainings()))


@given(data=st.data())
def test_inference_is_that_of_a_plain_loop(data):
    compare(data, data.draw(batchings(training=False)), {"lr": None, "loss": "mean"})
