"""Check how the spans of a call's transfers become groups and latencies."""

import torch

from ipu_dynamo import Options, compile_inference
from ipu_dynamo.program import Input, Output, Program, TensorType
from ipu_dynamo.runtime.execute.host_io.batching import Batching
from ipu_dynamo.runtime.execute.host_io.transfer_times import (
    CallTimes,
    Latency,
    TransferTimes,
    transfers_of,
)

SCALAR = TensorType(torch.float32, ())


def transfers(*outputs, times, iterations=1, accumulation=1, replicas=1, inputs=1):
    """The transfers of a program with these outputs."""
    streams = tuple(Input(f"x{i}", SCALAR) for i in range(inputs))
    drawn = Input(".random_key", SCALAR, "random")
    program = Program("training", 1, replicas, (), (*streams, drawn), outputs, (), ())
    batching = Batching(iterations, accumulation, replicas, tuple(range(replicas)))
    return transfers_of(program, batching, times, {output.name for output in outputs})


def output(returns, name="0", period=1):
    return Output(name, SCALAR, returns, period)


def one_after_the_other(count):
    """Times of a micro-batch k: received in 10k to 10k+1, sent in 10k+6 to 10k+8."""
    return CallTimes(
        [(10.0 * k, 10.0 * k + 1) for k in range(count)],
        [(10.0 * k + 6, 10.0 * k + 8) for k in range(count)],
    )


def latencies(moved):
    return moved.host_to_ipu, moved.compute, moved.ipu_to_host, moved.round_trip


def test_every_micro_batch_of_an_output_is_a_group():
    moved = transfers(output("all"), times=one_after_the_other(3), iterations=3, inputs=2)
    assert moved.inputs == (((0, 1), (10, 11), (20, 21)),) * 2
    assert moved.outputs == (((6, 8), (16, 18), (26, 28)),)
    assert latencies(moved) == ((1, 1, 1), (5, 5, 5), (2, 2, 2), (8, 8, 8))


def test_inputs_of_one_output_are_a_group():
    moved = transfers(output("final"), times=one_after_the_other(4), iterations=2, accumulation=2)
    assert moved.outputs == (((36, 38),),)
    assert latencies(moved) == ((31, 31, 31), (5, 5, 5), (2, 2, 2), (38, 38, 38))


def test_a_period_is_a_group_for_each_accumulation_step_and_replica():
    times = one_after_the_other(8)
    moved = transfers(
        output("every", period=2), times=times, iterations=2, accumulation=2, replicas=2
    )
    assert len(moved.inputs[0]) == 8
    assert moved.outputs == (((46, 48), (56, 58), (66, 68), (76, 78)),)
    assert moved.round_trip == (48, 48, 48)  # from 10k of the first iteration to the second's end
    assert moved.host_to_ipu == (41, 41, 41)


def test_latencies_are_least_most_and_mean():
    times = CallTimes([(0, 1), (2, 4)], [(5, 6), (10, 14)])
    moved = transfers(output("all"), times=times, iterations=2)
    assert moved.compute == (4, 6, 5)
    assert moved.ipu_to_host == (1, 4, 2.5)
    assert moved.round_trip == Latency(6, 12, 9)


def test_what_is_returned_last_goes_when_the_last_micro_batch_ended():
    """Micro-batches that run side by side may end in another order."""
    times = CallTimes([(3, 4), (0, 1)], [(8, 9), (5, 6)])
    for returns in ("final", "sum"):
        moved = transfers(output(returns), times=times, accumulation=2)
        assert moved.outputs == (((8, 9),),)
        assert latencies(moved) == ((4, 4, 4), (4, 4, 4), (1, 1, 1), (9, 9, 9))


def test_a_constant_goes_once():
    outputs = output("all"), output("once", "1")
    moved = transfers(*outputs, times=one_after_the_other(4), iterations=2, replicas=2)
    assert [len(spans) for spans in moved.outputs] == [4, 1]


def test_nothing_is_returned_where_nothing_ran():
    moved = transfers(output("all"), times=None)
    assert (moved.inputs, moved.outputs, moved.groups) == (((),), ((),), ())
    assert latencies(moved) == ((0, 0, 0),) * 4


def test_a_model_without_outputs_has_the_times_of_its_inputs():
    moved = transfers(times=one_after_the_other(2), iterations=2)
    assert latencies(moved) == ((11, 11, 11), (0, 0, 0), (0, 0, 0), (0, 0, 0))


def test_only_what_is_asked_for_is_recorded():
    options = Options(device_iterations=2, engine="eager")
    compiled = compile_inference(torch.nn.Linear(2, 2), options)
    rows = torch.ones(4, 2)
    expected = compiled(rows)
    assert compiled.transfers.groups == ()
    compiled.executable.transfers = TransferTimes()
    assert torch.equal(compiled(rows), expected)
    assert [len(spans) for spans in compiled.transfers.inputs] == [2]
