"""Check how calls split into micro-batches, and how outputs come back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import poptorch
from poptorch import CommGroupType, OutputMode
from tests.poptorch.executor.models import Classifier, batch

SMALL = st.integers(1, 3)


class Affine(nn.Module):
    """Returns one row per input row, and a scalar."""

    def forward(self, x):
        return 2 * x + 1, x.sum()


@given(
    iterations=SMALL,
    replicas=st.sampled_from([1, 2, 4]),
    rows=SMALL,
    mode=st.sampled_from(list(OutputMode)[:4]),
    data=st.data(),
)
def test_outputs_have_the_order_of_the_modes(iterations, replicas, rows, mode, data):
    period = data.draw(st.sampled_from([n for n in (1, 2, 3) if iterations % n == 0]))
    group = data.draw(st.sampled_from([n for n in (1, 2, 4) if replicas % n == 0]))
    kind = data.draw(st.sampled_from([CommGroupType.Consecutive, CommGroupType.Orthogonal]))
    options = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    options.inputReplicaGrouping(group, kind)
    options.outputMode(mode, period if mode is OutputMode.EveryN else None)
    groups = replicas // group
    x = torch.arange(float(iterations * groups * rows)).unsqueeze(1)
    blocks = x.view(iterations, groups, rows, 1)

    model = poptorch.inferenceModel(Affine(), options)
    for _ in range(2):
        ys, sums = model(x)
        per_replica = [
            blocks[:, r // group if kind == CommGroupType.Consecutive else r % groups]
            for r in range(replicas)
        ]
        values = torch.stack(per_replica, dim=1)  # [D, R, rows, 1]
        expected_ys, expected_sums = 2 * values + 1, values.sum((2, 3))
        if mode is OutputMode.Final:
            expected_ys, expected_sums = expected_ys[-1:], expected_sums[-1:]
        elif mode is OutputMode.EveryN:
            expected_ys = expected_ys[period - 1 :: period]
            expected_sums = expected_sums[period - 1 :: period]
        elif mode is OutputMode.Sum:
            expected_ys, expected_sums = expected_ys.sum(0), expected_sums.sum(0)
        assert torch.equal(ys, expected_ys.reshape(-1, 1))
        assert torch.equal(sums.reshape(-1), expected_sums.reshape(-1))
        assert sums.dim() == (expected_sums.numel() > 1)


@given(iterations=SMALL, accumulation=SMALL, replicas=st.sampled_from([1, 2]))
def test_training_is_torchs(iterations, accumulation, replicas):
    options = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    model, reference = Classifier(), Classifier()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    executor = poptorch.trainingModel(model, options, optimizer)
    torch_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    step = 2 * accumulation * replicas
    for call in range(2):
        x, y = batch(iterations * step, seed=call)
        executor(x, y)
        for i in range(iterations):
            torch_optimizer.zero_grad()
            _, loss = reference(x[i * step : (i + 1) * step], y[i * step : (i + 1) * step])
            loss.backward()
            torch_optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_rows_must_divide():
    options = poptorch.Options().deviceIterations(2)
    executor = poptorch.inferenceModel(Affine(), options)
    with pytest.raises(AssertionError, match=r"^Invalid batch dimension: In the input x"):
        executor(torch.zeros(3, 1))
    assert not executor.isCompiled()
    assert executor(torch.zeros(2, 1))[0].shape == (2, 1)


@pytest.mark.parametrize(
    ("iterations", "period", "words"), [(2, 3, "must be <= to"), (3, 2, "must be a factor of")]
)
def test_return_periods_must_fit(iterations, period, words):
    options = poptorch.Options().deviceIterations(iterations)
    options.outputMode(OutputMode.EveryN, period)
    executor = poptorch.inferenceModel(Affine(), options)
    with pytest.raises(poptorch.Error, match=words):
        executor(torch.zeros(iterations, 1))


def test_truth_values_have_no_sum():
    options = poptorch.Options().outputMode(OutputMode.Sum)
    executor = poptorch.inferenceModel(lambda x: x > 0, options)
    with pytest.raises(poptorch.Error, match="bool"):
        executor(torch.zeros(2))
