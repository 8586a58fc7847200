"""Check perf counters and latencies: what is counted, and how the figures relate."""

from time import perf_counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from tests.poptorch.executor.models import Classifier, Weighted, batch

NAMES = ["input", "input_complete", "output", "output_complete"]
MODES = poptorch.OutputMode


def latencies(executor):
    return [
        executor.getHostIpuLatency(),
        executor.getComputeLatency(),
        executor.getIpuHostLatency(),
        executor.getLatency(),
    ]


@st.composite
def cases(draw):
    """Device iterations, accumulation, replicas, input group, mode and period."""
    iterations, accumulation = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (1, 3)]))
    replicas, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
    mode = draw(st.sampled_from([MODES.All, MODES.EveryN, MODES.Final, MODES.Sum]))
    period = draw(st.sampled_from([n for n in (1, 2, 4) if iterations % n == 0]))
    return iterations, accumulation, replicas, group, mode, period


def trained(iterations, accumulation, replicas, group, mode, period):
    """An executor after a call, with the times before and after it."""
    options = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    options.inputReplicaGrouping(group, poptorch.CommGroupType.Consecutive)
    options.outputMode(mode, period)
    options.Training.gradientAccumulation(accumulation)
    executor = poptorch.trainingModel(Classifier(), options)
    data = batch(2 * iterations * accumulation * replicas // group)
    executor.compile(*data)
    begin = perf_counter()
    executor(*data)
    return executor, begin, perf_counter()


@given(cases())
def test_events_are_counted_and_lie_within_the_call(case):
    iterations, accumulation, replicas, _, mode, period = case
    executor, begin, end = trained(*case)
    counters = executor.getPerfCounters()
    assert list(counters) == NAMES
    micro_batches = iterations * accumulation * replicas
    returned = {
        MODES.All: micro_batches,
        MODES.EveryN: micro_batches // period,
        MODES.Final: replicas,
        MODES.Sum: replicas,
    }[mode]
    wanted = {"input": micro_batches, "output": returned}
    for kind, count in wanted.items():
        assert [len(events) for events in counters[kind]] == [count, count]
        for starts, ends in zip(counters[kind], counters[f"{kind}_complete"], strict=True):
            assert len(ends) == count
            assert all(begin <= a <= b <= end for a, b in zip(starts, ends, strict=True))


@given(cases())
def test_no_part_is_longer_than_its_round_trip_nor_that_than_the_call(case):
    executor, begin, end = trained(*case)
    parts = latencies(executor)
    round_trip = parts[-1]
    for minimum, maximum, mean in parts:
        assert 0 <= minimum <= mean <= maximum <= round_trip[1]
    assert round_trip[1] <= end - begin
    whole = sum(mean for _, _, mean in parts[:3])
    assert whole == pytest.approx(round_trip[2], rel=1e-9, abs=1e-9)  # both outputs go at once


def test_parts_of_one_output_add_up_to_the_time_between_its_first_and_last_event():
    executor = poptorch.inferenceModel(Classifier())
    executor(batch(2)[0])
    counters = executor.getPerfCounters()
    first, last = counters["input"][0][0], counters["output_complete"][0][0]
    assert executor.getLatency() == (last - first,) * 3
    parts = [mean for _, _, mean in latencies(executor)[:3]]
    assert sum(parts) == pytest.approx(last - first, rel=1e-9, abs=1e-9)


def test_pipelines_and_replicas_side_by_side_keep_the_rules():
    options = poptorch.Options().deviceIterations(4).replicationFactor(2)
    executor = poptorch.inferenceModel(Classifier(1), options)
    rows = batch(16)[0]
    executor(rows)
    begin = perf_counter()
    executor(rows)
    seconds = perf_counter() - begin
    assert [len(events) for events in executor.getPerfCounters()["output"]] == [8]
    parts = latencies(executor)
    assert all(0 < least <= mean <= most <= seconds for least, most, mean in parts)
    assert all(most <= parts[-1][1] for _, most, _ in parts)


def test_before_compiling_and_after_destroy_there_are_no_events():
    executor = poptorch.inferenceModel(Classifier())
    for _ in range(2):
        assert executor.getPerfCounters() == {name: [[]] for name in NAMES}
        assert latencies(executor) == [(0, 0, 0)] * 4
        executor(batch(2)[0])
        executor.destroy()


def test_compiled_but_not_run_has_a_list_for_each_tensor():
    executor = poptorch.trainingModel(Classifier())
    executor.compile(*batch(2))
    assert executor.getPerfCounters() == {name: [[], []] for name in NAMES}
    assert executor.getLatency() == (0, 0, 0)


def test_a_call_that_failed_leaves_the_figures_of_the_last_complete_one():
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True)
    executor = poptorch.trainingModel(Weighted(weight=10.0), options)
    executor(torch.ones(1))
    counters = executor.getPerfCounters()
    with pytest.raises(poptorch.Error):
        executor(torch.full((1,), 3e38))
    assert executor.getPerfCounters() == counters
    executor(torch.ones(1))
    assert executor.getPerfCounters()["input"][0][0] > counters["input"][0][0]


def test_synthetic_data_is_not_transferred():
    options = poptorch.Options().deviceIterations(2).enableSyntheticData(True)
    executor = poptorch.inferenceModel(Classifier(), options)
    scores = executor(torch.full((4, 4), torch.nan))
    assert (scores.shape, scores.any()) == ((4, 3), False)
    assert executor.getPerfCounters() == {
        name: [[]] for name in NAMES
    }  # one input, one output, no event
    assert executor.getLatency() == (0, 0, 0)


def test_training_on_synthetic_data_reads_no_input_and_draws_nothing():
    options = poptorch.Options().enableSyntheticData(True)
    model = Classifier()
    executor = poptorch.trainingModel(model, options)
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    before = model.first.weight.detach().clone()
    out, loss = executor(torch.full((4, 4), torch.nan), torch.full((4,), 99))
    assert torch.equal(torch.rand(1), drawn)
    assert (out.shape, loss.item()) == ((4, 3), 0)
    after = model.first.weight.detach()
    assert after.isfinite().all()
    assert not torch.equal(after, before)


@pytest.mark.inductor
def test_a_fused_step_has_the_same_events(monkeypatch):
    monkeypatch.setenv("IPU_DYNAMO_ENGINE", "inductor")
    case = 3, 1, 1, 1, MODES.All, 1
    executor, begin, end = trained(*case)
    assert executor._core.executable.fused is not None
    counters = executor.getPerfCounters()
    assert [len(events) for name in NAMES for events in counters[name]] == [3] * 8
    for k in range(3):
        events = [counters[name][0][k] for name in NAMES]
        assert begin <= events[0] <= events[1] < events[2] <= events[3] <= end
