"""Predict the time of a step, and its timeline: the work of each IPU, in sections.

- A grouped pipeline goes in cycles. A cycle is as long as the slowest IPU's work, then come the
  copies of all IPUs at once. Cycles of fill and flush count whole.
- One IPU, and several that are no pipeline, do one thing after the other.
- Any other schedule is followed pass by pass.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ipu_dynamo.machine.host_transfers import HostTransfers
from ipu_dynamo.machine.predicted_operators import Cycles
from ipu_dynamo.machine.predicted_time import IpuCycles, TimelineSection, Work
from ipu_dynamo.machine.step_costs import StepCosts, WorkItem
from ipu_dynamo.machine.step_sections import (
    LoopParts,
    host_section,
    one_by_one,
    pipelined_sections,
    section,
    side_by_side,
)
from ipu_dynamo.machine.timed_schedule import timed_sections
from ipu_dynamo.program.schedule.pipeline_clock import slots
from ipu_dynamo.program.schedule.stage_passes import calls_of_passes

_TRACKED: tuple[Work, ...] = ("copy", "host", "off chip", "replicas", "update")


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step.

    Args:
        timeline: of a step; its section `call` is there once in a call.
        cycles: of a step.
        call_cycles: of a call, with all its steps.
        ipus: the cycles of each IPU in a step, by kind of work.
    """

    timeline: tuple[TimelineSection, ...]
    cycles: int
    call_cycles: int
    ipus: tuple[IpuCycles, ...]


def step_time(costs: StepCosts) -> StepTime:
    """The time of a step of a program."""
    program, cut = costs.program, costs.cut
    count, transfers = cut.micro_batches, costs.transfers
    host = HostTransfers(program, costs.host, count, cut.steps, transfers.host_sync)
    parts = LoopParts(costs.passes, transfers, host)
    alone = {call.direction == "weights" or call.phase is not None for call in program.calls}
    if True in alone or program.schedule:
        loop = timed_sections(program, parts, count)
    elif program.order == "pipelined" and program.calls:
        loop = pipelined_sections(parts, slots(calls_of_passes(cut.loop)), count)
    else:
        loop = one_by_one(parts, count)
    serial = host.stops_all
    timeline = (
        *side_by_side("before", costs.around(cut.before)),
        *host_section("first load", host.ends("accumulation_loop", loads=True), serial=serial),
        *loop,
        *host_section("last store", host.ends("accumulation_loop", loads=False), serial=serial),
        *host_section("results", host.once, serial=serial),
        *side_by_side("after", costs.around(cut.after)),
        *section("host", (), _host_part(costs)),
    )
    ends = host.ends("device_iteration_loop", loads=True)
    ends += host.ends("device_iteration_loop", loads=False)
    of_call = host_section("call", ends, serial=serial)
    cycles = sum(s.count * s.cycles for s in timeline)
    in_call = cut.steps * cycles + sum(s.cycles for s in of_call)
    ipus = tuple(_ipu_cycles(costs, ipu, timeline, cycles) for ipu in range(program.num_ipus))
    return StepTime((*timeline, *of_call), cycles, in_call, ipus)


def _host_part(costs: StepCosts) -> int:
    """The cycles of the host's work for each update."""
    program, system = costs.program, costs.system
    if not any(c.rule for i in costs.cut.after for c in i.computes):
        return 0
    racks = program.replicas * program.num_ipus > system.rack_ipus
    seconds = float(system.update_seconds) + racks * float(system.racks_seconds)
    return costs.transfers.cycles(seconds)


def _ipu_cycles(
    costs: StepCosts, ipu: int, timeline: Iterable[TimelineSection], total: int
) -> IpuCycles:
    """Sum an IPU's cycles in a step by kind of work, from its spans."""
    times: Counter[str] = Counter()
    for part in timeline:
        for span in part.spans:
            if span.track == ipu:
                times[span.work] += part.count * span.cycles
    items: list[WorkItem] = [i for work in costs.passes for i in work.items if i.ipu == ipu]
    operators = Cycles.sum(item.operators for item in items) * costs.cut.micro_batches
    copies, host_io, off_chip, replicas, update = (times[work] for work in _TRACKED)
    host = _host_part(costs)
    busy = operators.total + copies + host_io + off_chip + replicas + update
    return IpuCycles(
        operators=operators,
        copies=copies,
        host_io=host_io,
        off_chip=off_chip,
        replicas=replicas,
        update=update,
        host=host,
        idle=total - host - busy,
    )
