"""Predict the memory of each IPU at each step of a program, and whether the program fits.

A tile holds the tensors that are always live, those live at a step, the temporary bytes of the
step's operator, and code. Code is an estimate, so bytes are an interval. A program *fits* if the
fullest tile has room for the high estimate, is *tight* if only for a lower one, and else *does not
fit*.
"""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from ipu_dynamo.machine.code_size import CodeSize, code_size
from ipu_dynamo.machine.cost import Resources, Roles
from ipu_dynamo.machine.costs.basics import machine_bytes
from ipu_dynamo.machine.costs.table import price
from ipu_dynamo.machine.memory_calls import memory_calls
from ipu_dynamo.machine.predicted_memory import (
    ByteEstimate,
    IpuMemory,
    MemoryCategory,
    MemoryVerdict,
    Peak,
    PeakTensor,
    TileProfile,
    Word,
)
from ipu_dynamo.machine.predicted_operators import OperatorRow
from ipu_dynamo.machine.step_costs import StepCosts
from ipu_dynamo.machine.tile_memory import FullestStep, fullest_step
from ipu_dynamo.program.liveness import IpuLiveness, LiveTensor, Role, liveness
from ipu_dynamo.program.liveness.live_tensors import CATEGORIES, CATEGORY_OF
from ipu_dynamo.program.machine_operators import MachineOperator

_KIND: Mapping[Role, str] = {
    "weight": "a weight",
    "accumulator": "the sum of a gradient",
    "state": "the optimiser's state",
    "stream": "a buffer of a host stream",
    "constant": "a constant",
    "stash": "the stash of a pipeline",
    "activation": "received",
}


def memory_of(costs: StepCosts) -> tuple[tuple[IpuMemory, ...], MemoryVerdict]:
    """Predict the memory of each IPU, and say whether the program fits.

    Args:
        costs: of a step. Read the step's time first: this adds the rows of updates, which need
            code, too.
    """
    resources = Resources(costs.system.ipu, io_tiles=costs.program.io_tiles)

    @cache
    def in_place(operator: MachineOperator) -> bool:
        return price(operator, resources, Roles(dying=frozenset((0,)))).in_place

    found = liveness(costs.program, size=machine_bytes, in_place=in_place)
    around: dict[int, list[OperatorRow]] = {}
    for row in costs.rows.used_rows:
        for ipu in dict.fromkeys(use.ipu for use in row.uses if row.direction == "around"):
            around.setdefault(ipu, []).append(row)
    memories = tuple(_ipu_memory(costs, live, around.get(live.ipu, [])) for live in found)
    return memories, _verdict(memories)


def _verdict(memories: Sequence[IpuMemory]) -> MemoryVerdict:
    ipu = max(range(len(memories)), key=lambda i: memories[i].profile.fullest.central)
    tile, limit = memories[ipu].profile.fullest, memories[ipu].tile_limit
    word: Word = "does not fit"
    if tile.low <= limit:
        word = "fits" if tile.high <= limit else "tight"
    return MemoryVerdict(word, ipu, tile, limit)


def _ipu_memory(costs: StepCosts, live: IpuLiveness, around: Sequence[OperatorRow]) -> IpuMemory:
    ipu, io_tiles = costs.system.ipu, costs.program.io_tiles
    tiles, computing = int(ipu.tiles), int(ipu.tiles) - io_tiles
    calls = dict(zip(costs.program.numbered_calls(), costs.calls, strict=True))
    own = [priced for priced in calls.values() if priced.call.ipu == live.ipu]
    operators = (
        pair for priced in own for pair in zip(priced.operators, priced.costs, strict=True)
    )
    code = code_size(operators, around)
    temporaries = [
        calls[step.number].costs[step.place].temporary if step.number in calls else 0
        for step in live.steps
    ]
    fullest = fullest_step(live, temporaries, tiles, io_tiles)
    tensors = live.at(fullest.step)
    temporary = temporaries[fullest.step] * computing if temporaries else 0
    places = {n: (place, costs.call_rows[place].block) for place, n in enumerate(calls)}
    blocks, memory = memory_calls(live, places, [each * computing for each in temporaries])
    limit = int(ipu.tile_bytes) - int(ipu.reserved_bytes)
    return IpuMemory(
        limit=limit * tiles,
        tile_limit=limit,
        always_live=_with_code(live.always, code, computing),
        total=_with_code(sum(t.nbytes for t in tensors) + temporary, code, computing),
        categories=_categories(tensors, temporary, code, computing),
        profile=_profile(fullest, code),
        blocks=blocks,
        calls=memory,
        peak=_peak(live, fullest.step, places, tensors),
    )


def _with_code(nbytes: int, code: CodeSize, tiles: int) -> ByteEstimate:
    return _plus(_times(code.vertices, tiles), _times(code.control, tiles), nbytes)


def _categories(
    tensors: Sequence[LiveTensor], temporary: int, code: CodeSize, tiles: int
) -> tuple[MemoryCategory, ...]:
    """The bytes of each category at the peak."""
    exact = dict.fromkeys(CATEGORIES, 0)
    exact["temporaries"] = temporary
    for tensor in tensors:
        exact[CATEGORY_OF[tensor.role]] += tensor.nbytes
    estimates = {name: ByteEstimate(*(nbytes,) * 3) for name, nbytes in exact.items()}
    estimates["vertex state and code"] = _times(code.vertices, tiles)
    estimates["exchange and control code"] = _times(code.control, tiles)
    return tuple(MemoryCategory(name, estimates[name]) for name in CATEGORIES)


def _times(size: ByteEstimate, count: int) -> ByteEstimate:
    return ByteEstimate(size.low * count, size.central * count, size.high * count)


def _plus(one: ByteEstimate, other: ByteEstimate, nbytes: int) -> ByteEstimate:
    return ByteEstimate(
        one.low + other.low + nbytes,
        one.central + other.central + nbytes,
        one.high + other.high + nbytes,
    )


def _profile(fullest: FullestStep, code: CodeSize) -> TileProfile:
    """The bytes of tiles; those that only transfer have no vertices."""
    computing = _plus(code.vertices, code.control, int(fullest.computing.max()))
    central = fullest.computing + code.vertices.central + code.control.central
    most = computing
    if fullest.transferring.size:
        none = ByteEstimate(0, 0, 0)
        transferring = _plus(none, code.control, int(fullest.transferring.max()))
        most = ByteEstimate(
            max(computing.low, transferring.low),
            max(computing.central, transferring.central),
            max(computing.high, transferring.high),
        )
        central = np.concatenate((central, fullest.transferring + code.control.central))
    return TileProfile(int(central.min()), int(np.sort(central)[central.size // 2]), most)


def _peak(
    live: IpuLiveness,
    step: int,
    places: Mapping[int, tuple[int, int]],
    tensors: Sequence[LiveTensor],
) -> Peak:
    call, place = -1, 0
    if live.steps and live.steps[step].number in places:
        call, place = places[live.steps[step].number][0], live.steps[step].place

    def named(tensor: LiveTensor) -> PeakTensor:
        made = None if tensor.maker is None else live.steps[tensor.maker]
        own = made is not None and tensor.role in ("activation", "stash") and made.place >= 0
        maker = made.name if own and made is not None else _KIND[tensor.role]
        line = made.source if own and made is not None else ""
        reader = "" if tensor.reader is None else live.steps[tensor.reader].name
        category = CATEGORY_OF[tensor.role]
        return PeakTensor(
            tensor.name, str(tensor.type), tensor.nbytes, category, maker, line, reader
        )

    return Peak(call, place, tuple(map(named, tensors)))
