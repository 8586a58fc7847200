"""Predict the time and memory of a program on a system of IPUs."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from ipu_dynamo.machine.cost import COLUMNS
from ipu_dynamo.machine.figure import MARKS
from ipu_dynamo.machine.ipu import Ipu
from ipu_dynamo.machine.memory import memory_of
from ipu_dynamo.machine.predicted_operators import OperatorRow
from ipu_dynamo.machine.prediction import (
    VERSION,
    Constant,
    IpuPrediction,
    MarkShare,
    Prediction,
    Reproduce,
    Unknown,
)
from ipu_dynamo.machine.step_costs import StepCosts
from ipu_dynamo.machine.step_time import StepTime, step_time
from ipu_dynamo.machine.system import System, system_of
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.types import dtype_name
from ipu_dynamo.version import __version__

log = logging.getLogger("ipu_dynamo.machine")
_SLOW_PASS = "priced as a slow pass over its results"
_NOTES = (
    "Steps of large models on more than one machine of IPUs are predicted too fast: a part of the "
    "fixed time of a step depends on software and model.",
    "Poplar's own placement of variables on tiles is not known; bytes are dealt evenly.",
    "Code of the machine is an estimate, so bytes are an interval.",
)
_WITHOUT_UPDATE = (
    "This program has no update and no accumulators: through torch.compile the forward and the "
    "backward pass are programs of their own.",
)


def predict_program(
    program: Program,
    machine: str | Ipu | System = "bow",
    *,
    model: str = "",
    command: str = "",
    options: Sequence[str] = (),
) -> Prediction:
    """Predict cycles and memory of a program.

    Args:
        machine: the name of a system, or an IPU of which there are as many as it needs.
        model: its name, for readers.
        command: that makes the same prediction; empty: none is known.
        options: that the program was made with, for readers.

    Raises:
        OptionError: the machine is unknown, or has too few IPUs.
    """
    system = system_of(machine)
    system.check(program.replicas * program.num_ipus)
    costs = StepCosts(program, system)
    time = step_time(costs)
    memories, verdict = memory_of(costs)
    rows, cut = costs.rows, costs.cut
    calls = costs.call_rows
    operators = rows.used_rows
    weighted = _weighted(operators, cut.micro_batches)
    seconds = time.call_cycles / cut.steps / float(system.ipu.clock)
    batch = _rows_of_input(program)
    items = batch * cut.micro_batches * program.replicas
    total = time.cycles * len(time.ipus)
    waiting = sum(ipu.idle + ipu.host for ipu in time.ipus)
    return Prediction(
        version=VERSION,
        model=model,
        system=system.name,
        kind=program.kind,
        num_ipus=program.num_ipus,
        replicas=program.replicas,
        num_stages=program.num_stages,
        micro_batches=cut.micro_batches,
        device_iterations=cut.steps,
        micro_batch_rows=batch,
        dtypes=_dtypes(program),
        partials=_partials(weighted),
        clock=float(system.ipu.clock),
        step_seconds=seconds,
        cycles=time.call_cycles,
        items_per_second=items / seconds if batch and seconds else None,
        idle=waiting / total if total else 0.0,
        relayout=_share((r.cycles.relayout * n, r.cycles.total * n) for r, n in weighted),
        limits=_limits(time),
        verdict=verdict,
        ipus=tuple(map(IpuPrediction, time.ipus, memories)),
        modules=rows.modules,
        operators=operators,
        blocks=rows.blocks,
        calls=calls,
        timeline=time.timeline,
        marks=_marks(weighted),
        unknown=_unknown(weighted),
        notes=(
            *_tight_products(weighted),
            *_NOTES,
            *(_WITHOUT_UPDATE if program.kind in ("forward", "backward") else ()),
        ),
        machine=tuple(
            Constant(name, float(f), f.unit, f.mark, f.source) for name, f in system.figures()
        ),
        reproduce=Reproduce(command, _versions(), tuple(options)),
    )


def _versions() -> tuple[str, ...]:
    return f"ipu_dynamo {__version__}", f"torch {torch.__version__}"


Weighted = Sequence[tuple[OperatorRow, int]]  # with the runs on all IPUs in a step


def _weighted(operators: Sequence[OperatorRow], micro_batches: int) -> Weighted:
    return [
        (row, row.count * (1 if row.direction == "around" else micro_batches)) for row in operators
    ]


def _share(parts: Iterable[tuple[int, int]]) -> float:
    """The sum of the first numbers as a share of the sum of the second ones."""
    some, every = 0, 0
    for one, of in parts:
        some, every = some + one, every + of
    return some / every if every else 0.0


def _marks(weighted: Weighted) -> tuple[MarkShare, ...]:
    """The share of the operators' cycles by mark."""
    cycles: Counter[str] = Counter()
    for row, count in weighted:
        for column in COLUMNS:
            if mark := getattr(row.marks, column):
                cycles[mark] += count * getattr(row.cycles, column)
    total = cycles.total()
    return tuple(MarkShare(mark, cycles[mark] / total) for mark in MARKS if cycles[mark])


def _unknown(weighted: Weighted) -> tuple[Unknown, ...]:
    """The operators without a formula, with their share of all cycles, the largest first."""
    total = sum(count * row.cycles.total for row, count in weighted)
    found = [
        Unknown(row.operator, row.warning or _SLOW_PASS, row.line, count * row.cycles.total / total)
        for row, count in weighted
        if not row.known or (row.warning and not row.plan)
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda one: -one.share))


def _tight_products(weighted: Weighted) -> tuple[str, ...]:
    """What to say of products that need more memory than their share."""
    tight = [row for row, _ in weighted if row.warning and row.plan]
    if not tight:
        return ()
    largest = max(tight, key=lambda row: row.temporary)
    count, where = sum(row.count for row in tight), largest.line or "an unknown line"
    note = (
        f"{count} products need more temporary memory than their share of a tile; "
        f"of {largest.operator} at {where}: {largest.warning}"
    )
    log.warning("%s; a larger memory proportion helps", note)
    return (f"{note}.",)


def _dtypes(program: Program) -> tuple[str, ...]:
    """The dtypes of parameters, most bytes first."""
    nbytes: Counter[str] = Counter()
    for variable in program.variables:
        if variable.kind == "parameter":
            nbytes[dtype_name(variable.type.dtype)] += variable.type.nbytes
    return tuple(name for name, _ in nbytes.most_common())


def _partials(weighted: Weighted) -> tuple[str, ...]:
    """The kinds of products, most cycles first."""
    cycles: Counter[str] = Counter()
    for row, count in weighted:
        if row.plan:
            cycles[row.plan.partition(":")[0]] += count * row.cycles.total
    return tuple(name for name, _ in cycles.most_common())


def _rows_of_input(program: Program) -> int:
    """The rows of a micro-batch of the first host input; 0 without host inputs."""
    streams = [stream for stream in program.inputs if stream.source == "host"]
    if not streams:
        return 0
    shape, dim = streams[0].type.shape, streams[0].dim
    return shape[dim] if shape else 1


def _limits(time: StepTime) -> str:
    """A sentence on what limits the step."""
    ipu, cycles = max(enumerate(time.ipus), key=lambda pair: pair[1].busy)
    operators = cycles.operators
    parts = {
        "compute": operators.compute,
        "exchange between tiles": operators.exchange,
        "re-layout": operators.relayout,
        "reductions": operators.reduction,
        "overhead of operators": operators.overhead,
        "copies between IPUs": cycles.copies,
        "host transfers": cycles.host_io,
        "streaming memory": cycles.off_chip,
        "replicas": cycles.replicas,
        "updates": cycles.update,
        "waiting for the host": cycles.host,
        "waiting for other IPUs": cycles.idle,
    }
    (first, most), (second, more) = Counter(parts).most_common(2)
    whole = max(time.cycles, 1)
    return (
        f"Of the step of IPU {ipu}, the busiest, {100 * most / whole:.0f} % is {first} and "
        f"{100 * more / whole:.0f} % {second}."
    )
