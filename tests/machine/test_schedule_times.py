"""Check how long steps take, and that IPUs do one thing at a time, with drawn costs."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import (
    Block,
    Options,
    Strategy,
    predict,
    set_overlap_for_input,
    set_overlap_for_output,
)
from ipu_dynamo.machine import call_costs
from ipu_dynamo.machine.cost import Cost
from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.machine.system import machines
from ipu_dynamo.options import StageSpec
from ipu_dynamo.program.schedule.planning import pipelined
from tests.program.schedule.test_schedule import training_calls

BOW = machines["bow"]
CLOCK = float(BOW.ipu.clock)
WIDTH, ROWS = 8, 4


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.slow)])
def drawn_costs(request, monkeypatch):
    """Price operators by chance, each always the same."""

    def price(operator, resources, roles):
        text = f"{request.param} {operator.operator} {operator.operands} {operator.direction}"
        return Cost(compute=float(crc32(text.encode()) % 200_000))

    monkeypatch.setattr(call_costs, "price", price)


class Chain(nn.Module):
    """Layers in blocks of their own, each on an IPU; the loss is with the last one."""

    def __init__(self, ipus, overlap_in=None, overlap_out=None):
        super().__init__()
        self.ipus, self.overlaps = ipus, (overlap_in, overlap_out)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in ipus)

    def forward(self, x, y=None):
        overlap_in, overlap_out = self.overlaps
        if overlap_in:
            x = set_overlap_for_input(x, overlap_in)
        for number, (layer, ipu) in enumerate(zip(self.layers, self.ipus, strict=True)):
            with Block(f"b{number}", ipu_id=ipu):
                x = torch.tanh(layer(x))
                if number == len(self.ipus) - 1:
                    loss = x if y is None else nn.functional.mse_loss(x, y)
        return set_overlap_for_output(loss, overlap_out) if overlap_out else loss


def predicted(ipus, micro_batches=6, *, training=True, machine=BOW, overlaps=(), **options):
    """The prediction of a chain on the meta device."""
    with torch.device("meta"):
        model, x, y = Chain(ipus, *overlaps), torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    kind = "pipelined" if len({*ipus}) > 1 else "sharded"
    options = {"strategy": Strategy(kind=kind, auto_stage="auto_increment")} | options
    if training:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = Options(gradient_accumulation=micro_batches, **options)
        return predict(model, x, y, optimizer=optimizer, options=options, machine=machine)
    options = Options(device_iterations=micro_batches, **options)
    return predict(model.eval(), x, options=options, machine=machine)


def phased(liveness, kind="serial_phased", **options):
    """The prediction of a chain of three phases."""
    ipus = (0, 1, 0) if kind == "parallel_phased" else (0, 0, 0)
    stages = tuple((StageSpec((f"b{n}",), ipu),) for n, ipu in enumerate(ipus))
    strategy = Strategy(kind=kind, phases=stages, liveness=liveness)
    return predicted(ipus, strategy=strategy, **options)


def loop(prediction: Prediction):
    """The cycles of a step's micro-batches."""
    names = ("fill", "period", "flush", "host transfers")
    return sum(s.count * s.cycles for s in prediction.timeline if s.name in names)


def work(prediction: Prediction, ipu: int):
    """The cycles of an IPU's calls and writes of a micro-batch."""
    calls = sum(call.cycles for call in prediction.calls if call.ipu == ipu)
    rows = [r for r in prediction.operators if "Accumulate" in r.operator]
    return calls + sum(r.cycles.total * u.count for r in rows for u in r.uses if u.ipu == ipu)


def copy_cycles(*nbytes: int):
    """The cycles of copies within a machine that take place at once."""
    return max(-(-(n / 50e9 + 1e-6) * CLOCK // 1) for n in nbytes)


def host_cycles(nbytes: int):
    return -(-nbytes / 12.5e9 * CLOCK // 1)


SYNC = 18_500  # 10 us
TENSOR = ROWS * WIDTH * 4  # bytes
OVERLAPPING = {"io_tiles": 32, "output_mode": "all", "strategy": Strategy(kind="sharded")}
ALL = {
    "one IPU": lambda: predicted((0, 0)),
    "sharded": lambda: predicted((0, 1, 0), strategy=Strategy(kind="sharded")),
    "pipeline": lambda: predicted((0, 1, 2)),
    "back to IPU 0": lambda: predicted((0, 1, 2, 0), 9),
    "short pipeline": lambda: predicted((0, 1), 3),
    "zero bubble": lambda: predicted(
        (0, 1, 2), 40, strategy=Strategy(kind="pipelined", schedule="zero_bubble")
    ),
    **{
        name: partial(predicted, ipus, count, strategy=Strategy("pipelined", schedule=name))
        for name, ipus, count in (
            ("gpipe", (0, 1, 2), 9),
            ("1f1b", (0, 1, 2), 40),
            ("interleaved", (0, 1, 0, 1), 8),
            ("zb_h1", (0, 1, 2), 12),
            ("zb_v", (0, 1, 1, 0), 12),
        )
    },
    "inference": lambda: predicted((0, 1, 2), training=False),
    "serial phases": lambda: phased("off_chip_after_fwd"),
    "each phase": lambda: phased("off_chip_after_each_phase"),
    "parallel phases": lambda: phased("always_live", "parallel_phased", micro_batches=12),
    "alone": lambda: predicted((0, 1, 2), sync_pattern="single_pipeline"),
    "ladder": lambda: phased("always_live", "parallel_phased", sync_pattern="replica_and_ladder"),
    "overlap": lambda: predicted((0, 1), overlaps=("accumulation_loop",) * 2, **OVERLAPPING),
}


def unrolled(prediction: Prediction):
    """All spans of a step by track, with their place in it."""
    tracks, begin = defaultdict(list), 0
    for section in prediction.timeline:
        if section.name == "call":
            continue
        for _ in range(section.count):
            for span in section.spans:
                tracks[span.track].append((begin + span.start, begin + span.start + span.cycles))
            begin += section.cycles
    return tracks, begin


@pytest.mark.few(8)
@pytest.mark.usefixtures("drawn_costs")
@pytest.mark.parametrize("name", ALL)
def test_an_ipu_never_does_two_things_at_once_and_its_cycles_sum_up(name):
    prediction = ALL[name]()
    tracks, total = unrolled(prediction)
    assert total == prediction.cycles // prediction.device_iterations
    for number, ipu in enumerate(prediction.ipus):
        spans = sorted(tracks[number])
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(start >= 0 and end <= total for start, end in spans)
        assert sum(end - start for start, end in spans) == ipu.cycles.busy
        assert ipu.cycles.total == total
        assert ipu.cycles.idle >= 0


@pytest.mark.few(8)
@pytest.mark.usefixtures("drawn_costs")
@pytest.mark.parametrize("name", ALL)
def test_no_schedule_is_shorter_than_its_longest_path(name):
    prediction = ALL[name]()
    one = sum(call.cycles for call in prediction.calls if call.direction != "weights")
    count = prediction.micro_batches
    busiest = max(work(prediction, ipu) for ipu in range(prediction.num_ipus))
    assert loop(prediction) >= max(one, count * busiest)


@pytest.mark.usefixtures("drawn_costs")
@pytest.mark.parametrize("ipus", [(0, 1), (0, 1, 2), (0, 1, 2, 0)])
@pytest.mark.parametrize("training", [True, False])
def test_a_grouped_pipeline_takes_a_cycle_for_each_micro_batch_and_stage_before_the_last(
    ipus, training
):
    count, prediction = 11, predicted(ipus, 11, training=training)
    stages = 2 * len(ipus) - 1 if training else len(ipus)
    slowest = max(work(prediction, ipu) for ipu in {*ipus})
    copies = copy_cycles(*[TENSOR] * 2)
    streams = 2 * host_cycles(TENSOR)  # x and y, or x and the result
    cycle = slowest + copies + streams + SYNC
    assert loop(prediction) == (count + stages - 1) * cycle


@pytest.mark.usefixtures("drawn_costs")
def test_one_ipu_takes_the_sum():
    prediction = predicted((0, 0, 0), 5)
    streams = 2 * host_cycles(TENSOR) + SYNC
    assert loop(prediction) == 5 * (work(prediction, 0) + streams)


@pytest.mark.usefixtures("drawn_costs")
@pytest.mark.parametrize("ipus", [(0, 0), (0, 1, 2)])
def test_one_more_replica_changes_no_forward_and_backward_cycles(ipus):
    one, two = predicted(ipus), predicted(ipus, replicas=2)
    assert loop(one) == loop(two)
    assert [i.cycles.operators for i in one.ipus] == [i.cycles.operators for i in two.ipus]
    assert two.items_per_second == pytest.approx(2 * ROWS * 6 / two.step_seconds)
    assert all(ipu.cycles.replicas > 0 for ipu in two.ipus)


@given(data=st.data())
def test_longer_passes_make_no_schedule_shorter(data):
    calls = training_calls(data.draw(st.integers(1, 4)))
    schedule = pipelined(calls, micro_batches=data.draw(st.integers(1, 6)))
    times = st.integers(0, 9)
    lengths = [data.draw(times) for _ in schedule.passes]
    delays = [data.draw(times) for _ in schedule.transfers]
    whole = schedule.timed(lengths, delays)
    more = data.draw(st.integers(0, len(lengths) - 1))
    longer = [length + (number == more) for number, length in enumerate(lengths)]
    assert schedule.timed(longer, delays).cycles >= whole.cycles
    assert whole.cycles >= sum(lengths)


@pytest.mark.usefixtures("drawn_costs")
def test_a_copy_delays_the_pass_that_reads_it():
    fast, slow = (
        predicted(
            (0, 1),
            strategy=Strategy(kind="pipelined", schedule="zero_bubble"),
            machine=replace(BOW, link_seconds=seconds),
        )
        for seconds in (0.0, 1e-2)
    )
    copies = 2  # there and back, of the first or the last micro-batch at least
    assert loop(slow) >= loop(fast) + copies * (1e-2 * CLOCK - max(work(fast, i) for i in (0, 1)))


@pytest.mark.usefixtures("drawn_costs")
@pytest.mark.parametrize("mode", ["accumulation_loop", "device_iteration_loop"])
@pytest.mark.parametrize("count", [1, 6])
def test_an_overlapped_load_is_hidden_behind_the_micro_batch_before(mode, count):
    slow = {"machine": replace(BOW, host=1e6), **OVERLAPPING}  # 128 us for a tensor
    load, loss = round(TENSOR / 1e6 * CLOCK), round(4 / 1e6 * CLOCK)
    plain = predicted((0,), count, **slow)
    overlapped = predicted((0,), count, overlaps=(mode,), **slow)
    own, exposed = work(plain, 0), load + loss + SYNC  # y and the loss are not overlapped
    assert loop(plain) == count * (own + load + exposed)
    hides = count > 1
    assert loop(overlapped) == count * ((max(own, load) if hides else own + load) + exposed)
    alone = load if hides else 0  # the first one
    assert overlapped.cycles == plain.cycles - loop(plain) + loop(overlapped) + alone
    first = [s.name for s in overlapped.timeline if s.name in ("first load", "call")]
    names = {"accumulation_loop": "first load", "device_iteration_loop": "call"}
    assert first == ([names[mode]] if hides else [])


@pytest.mark.usefixtures("drawn_costs")
def test_a_load_stands_alone_once_in_a_step_or_once_in_a_call():
    of_loop = {
        mode: predicted((0,), 3, overlaps=(mode,), device_iterations=4, **OVERLAPPING)
        for mode in ("accumulation_loop", "device_iteration_loop")
    }
    in_step, in_call = of_loop.values()
    assert in_step.cycles - in_call.cycles == 3 * host_cycles(TENSOR)


@pytest.mark.usefixtures("drawn_costs")
def test_an_ipu_alone_waits_for_its_transfer_where_the_pattern_says_so():
    machine = replace(BOW, host=1e6)
    load = round(TENSOR / 1e6 * CLOCK)
    full = predicted((0, 1), machine=machine)
    alone = predicted((0, 1), machine=machine, sync_pattern="single_pipeline")
    slowest = max(work(full, ipu) for ipu in (0, 1))
    stages = 3
    copies = copy_cycles(TENSOR)
    assert loop(full) == (6 + stages - 1) * (slowest + 2 * load + SYNC + copies)
    assert loop(alone) == (6 + stages - 1) * (slowest + load + SYNC + copies)


@pytest.mark.usefixtures("drawn_costs")
def test_liveness_of_phases_decides_what_leaves_the_chip():
    cycles = {
        liveness: phased(liveness).ipus[0].cycles
        for liveness in (
            "always_live",
            "off_chip_after_fwd",
            "off_chip_after_fwd_no_overlap",
            "off_chip_after_each_phase",
        )
    }
    live, after, apart, each = (c.off_chip for c in cycles.values())
    assert live <= after <= apart <= each
    assert after < each
    assert live < after
