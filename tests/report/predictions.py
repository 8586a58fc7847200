"""Build predictions without a program: of any size, with sums that hold."""

import random
from dataclasses import replace

from ipu_dynamo.machine.predicted_memory import (
    ByteEstimate,
    HeldValue,
    IpuMemory,
    Lifetime,
    MemoryBlock,
    MemoryCall,
    MemoryCategory,
    MemoryVerdict,
    Peak,
    PeakTensor,
    TileProfile,
)
from ipu_dynamo.machine.predicted_operators import (
    CallRow,
    ColumnMarks,
    Cycles,
    OperatorBlock,
    OperatorRow,
    OperatorUse,
)
from ipu_dynamo.machine.predicted_time import IpuCycles, TimelineSection, TimelineSpan
from ipu_dynamo.machine.prediction import (
    VERSION,
    Constant,
    IpuPrediction,
    MarkShare,
    Prediction,
    Reproduce,
    Unknown,
)
from ipu_dynamo.program.liveness.live_tensors import CATEGORIES

TILES, TILE_LIMIT = 1472, 636928
LIMIT = TILES * TILE_LIMIT
MICRO_BATCHES = 16
NAMES = ("aten.mm.default", "aten.add.Tensor", "aten.gelu.default", "aten._softmax.default")


def drawn_prediction(
    *,
    seed: int = 0,
    ipus: int = 4,
    rows: int = 20,
    layers: int = 3,
    used: float = 0.7,
    line: str = "model.py",
    module: str = "encoder.layer",
    model: str = "Encoder",
) -> Prediction:
    """A training step in which each IPU has a forward and a backward call.

    Args:
        rows: distinct operators; each call runs all of them once for each of its layers.
        used: bytes of IPU 0 at its peak, as a share of its memory; the others need less.
    """
    rng = random.Random(seed)
    places = [(ipu, layer) for ipu in range(ipus) for layer in range(layers)]
    modules = tuple(f"{module}.{ipu * layers + layer}" for ipu, layer in places)
    directions = ("forward", "backward")
    operators = tuple(
        _row(rng, direction, i, line, [OperatorUse(p, p, p * layers + n, 1) for p, n in places])
        for direction in directions
        for i in range(rows)
    )
    blocks = tuple(
        OperatorBlock(f"{direction}_block", tuple(range(at * rows, at * rows + rows)) * layers)
        for at, direction in enumerate(directions)
    )
    cycles = [sum(operators[row].cycles.total for row in block.operators) for block in blocks]
    calls = tuple(
        CallRow(f"{ipu}{direction[0].upper()}", ipu, ipu, direction, at, cycles[at], f"{line}:3")
        for at, direction in enumerate(directions)
        for ipu in (range(ipus) if at == 0 else reversed(range(ipus)))
    )
    period = sum(cycles)
    update = 1000 * rows
    step = MICRO_BATCHES * period + update
    of_one = Cycles.sum(operators[row].cycles for block in blocks for row in block.operators)
    busy = IpuCycles(of_one * MICRO_BATCHES, 0, 0, 0, 0, update, 0, 0)
    memories = [
        _memory(operators, blocks, calls, i, used * (1 - 0.4 * i / ipus)) for i in range(ipus)
    ]
    fullest = memories[0].profile.fullest
    word = "tight" if fullest.high > TILE_LIMIT else "fits"
    verdict = MemoryVerdict(
        "does not fit" if fullest.low > TILE_LIMIT else word, 0, fullest, TILE_LIMIT
    )
    clock = 1.85e9
    return Prediction(
        version=VERSION,
        model=model,
        system="bow-pod4",
        kind="training",
        num_ipus=ipus,
        replicas=1,
        num_stages=ipus,
        micro_batches=MICRO_BATCHES,
        device_iterations=1,
        micro_batch_rows=8,
        dtypes=("f16",),
        partials=("16.16",),
        clock=clock,
        step_seconds=step / clock,
        cycles=step,
        items_per_second=8 * MICRO_BATCHES * clock / step,
        idle=0.0,
        relayout=0.2,
        limits="All IPUs compute all the time; re-layout takes a fifth of it.",
        verdict=verdict,
        ipus=tuple(IpuPrediction(busy, memory) for memory in memories),
        modules=modules,
        operators=operators,
        blocks=blocks,
        calls=calls,
        timeline=_timeline(calls, period, update, ipus),
        marks=(MarkShare("F", 0.5), MarkShare("D", 0.2), MarkShare("fitted", 0.3)),
        unknown=(Unknown("my.op.default", "4 cycles for each vector", f"{line}:9", 0.01),),
        notes=("Steps of large models on more than one machine are predicted too fast.",),
        machine=(
            Constant("tiles", 1472.0, "", "F", "docs"),
            Constant("clock", clock, "Hz", "F", "x"),
        ),
        reproduce=Reproduce(
            "ipu-dynamo predict encoder.txt --machine bow-pod4", ("torch 2.13.0",), ()
        ),
    )


def empty_prediction() -> Prediction:
    """A program that runs no operator; its peak is outside of calls."""
    prediction = drawn_prediction(ipus=1, rows=1)
    (ipu,) = prediction.ipus
    memory = replace(ipu.memory, blocks=(), calls=(), peak=Peak(-1, 0, ()))
    return replace(
        prediction,
        ipus=(IpuPrediction(IpuCycles(Cycles(), 0, 0, 0, 0, 0, 0, 0), memory),),
        items_per_second=None,
        **dict.fromkeys(("operators", "blocks", "calls", "modules"), ()),
        **dict.fromkeys(("timeline", "marks", "unknown", "notes", "machine"), ()),
    )


def _row(rng, direction, number, line, uses) -> OperatorRow:
    name = NAMES[number % len(NAMES)]
    product = name.endswith("mm.default")
    size = 16 * (number + 1)
    cycles = Cycles(
        rng.randrange(5000, 90000),
        rng.randrange(100, 9000),
        rng.randrange(9000) if product else 0,
        rng.randrange(900) if product else 0,
        1600,
    )
    return OperatorRow(
        operator=name,
        operands=(f"f16[{size},64]", f"f16[64,{size}]"),
        results=(f"f16[{size},{size}]",),
        line=f"{line}:{number % 40 + 1} in forward: y = x @ w",
        direction=direction,
        cycles=cycles,
        marks=ColumnMarks("F", "D", "fitted" if product else None, None, "fitted"),
        flops=2 * 64 * size * size if product else 0,
        bound_flops=4000 if product else 0,
        bound_exchange=90,
        bound_memory=50,
        nbytes=2 * (128 * size + size * size),
        temporary=rng.randrange(50000),
        plan="4 x 8 x 2, 2 steps" if product else "",
        steps=1,
        known=True,
        uses=tuple(uses),
    )


def _memory(operators, blocks, calls, ipu, used) -> IpuMemory:
    """Memory whose peak is in the middle of the backward call."""
    own = [position for position, call in enumerate(calls) if call.ipu == ipu]
    shares = (0.3, 0.2, 0.1, 0.12, 0.02, 0.06, 0.05)
    always = [int(share * used * LIMIT) for share in shares]
    rest = int(0.15 * used * LIMIT)
    memory_blocks = []
    for position, block in enumerate(blocks):
        steps = len(block.operators)
        mean = sum(operators[row].nbytes for row in block.operators) // steps
        sizes = [operators[row].nbytes * rest // (4 * mean) for row in block.operators]
        lifetimes = tuple(
            Lifetime(f"v_{i}", operators[row].results[0], sizes[i], i, min(i + 2, steps - 1))
            for i, row in enumerate(block.operators)
        )
        live = tuple(sum(sizes[max(0, i - 2) : i + 1]) for i in range(steps))
        temporaries = tuple(TILES * operators[row].temporary for row in block.operators)
        memory_blocks.append(MemoryBlock(position, live, temporaries, lifetimes))
    held = lifetimes[0].nbytes
    memory_calls = (
        MemoryCall(own[0], 0, 0, ()),
        MemoryCall(own[1], 1, held, (HeldValue(own[0], 0),)),
    )
    last = memory_blocks[1]
    both = [a + t for a, t in zip(last.activations, last.temporaries, strict=True)]
    step = both.index(max(both))
    parts = [*always, held + last.activations[step], last.temporaries[step]]
    code = parts[5] + parts[6]
    total = sum(parts)

    def interval(central: int, uncertain: int) -> ByteEstimate:
        return ByteEstimate(central - uncertain // 2, central, central + uncertain)

    categories = tuple(
        MemoryCategory(name, interval(part, part if "code" in name else 0))
        for name, part in zip(CATEGORIES, parts, strict=True)
    )
    fullest = interval(total // TILES + 9000, code // TILES)
    tensors = tuple(
        PeakTensor(
            f"encoder.{i}.weight",
            "f16[1024,1024]",
            always[0] // (i + 2),
            "weights" if i % 2 else "activations",
            "parameter" if i % 2 else "aten.mm.default",
            "" if i % 2 else "model.py:7 in forward: y = x @ w",
            "aten.mm.default",
        )
        for i in range(12)
    )
    return IpuMemory(
        limit=LIMIT,
        tile_limit=TILE_LIMIT,
        always_live=interval(sum(always), code),
        total=interval(total, code),
        categories=categories,
        profile=TileProfile(total // TILES - 9000, total // TILES, fullest),
        blocks=tuple(memory_blocks),
        calls=memory_calls,
        peak=Peak(own[1], step, tensors),
    )


def _timeline(calls, period, update, ipus) -> tuple[TimelineSection, ...]:
    """Every IPU runs its two calls one after the other in each micro-batch."""
    start = dict.fromkeys(range(ipus), 0)
    spans = []
    for position, call in enumerate(calls):
        at = start[call.ipu]
        spans.append(TimelineSpan(call.ipu, at, call.cycles, "call", call.name, position, 0))
        start[call.ipu] += call.cycles
    after = tuple(TimelineSpan(i, 0, update, "update", "update", -1, -1) for i in range(ipus))
    return (
        TimelineSection("period", MICRO_BATCHES, period, tuple(spans)),
        TimelineSection("after", 1, update, after),
    )
