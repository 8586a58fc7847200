"""Show the memory of each IPU: bars for the first screen, and memory over program steps."""

from itertools import accumulate

from ipu_dynamo.machine.predicted_memory import IpuMemory, MemoryBlock
from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.report.views.compact import (
    Json,
    Strings,
    pack_columns,
    pack_repeated,
    stem_and_number,
)

_ALL_IPUS = 16  # of more, the first screen shows the fullest and the slowest
_PASSING = ("activations", "temporaries")  # categories of values that are not always live


def ipu_bars(prediction: Prediction) -> list[Json]:
    """Figures of each IPU for the first screen. Bytes are those at its peak."""
    first = _first_shown(prediction)
    return [_bar(prediction, i) | {"first": i in first} for i in range(len(prediction.ipus))]


def category_names(prediction: Prediction) -> list[str]:
    """The names of the categories, in the order of bars."""
    return [c.name for c in prediction.ipus[0].memory.categories] if prediction.ipus else []


def memory_views(prediction: Prediction, strings: Strings) -> list[Json]:
    """Memory over the program steps of a micro-batch, for each IPU.

    Equal calls share a block: its values are there once.
    """
    return [_memory(ipu.memory, strings) for ipu in prediction.ipus]


def _first_shown(prediction: Prediction) -> set[int]:
    ipus, half = prediction.ipus, _ALL_IPUS // 2
    numbers = range(len(ipus))
    if len(ipus) <= _ALL_IPUS:
        return set(numbers)
    fullest = sorted(numbers, key=lambda i: -ipus[i].memory.total.central)[:half]
    slowest = sorted(numbers, key=lambda i: -ipus[i].cycles.busy)
    others = [i for i in slowest if i not in fullest and i != prediction.verdict.ipu]
    return {prediction.verdict.ipu, *fullest, *others[:half]}


def _bar(prediction: Prediction, number: int) -> dict[str, Json]:
    ipu = prediction.ipus[number]
    memory, tile = ipu.memory, ipu.memory.profile
    tiles = round(memory.limit / memory.tile_limit) if memory.tile_limit else 0
    fullest = tile.fullest
    fits = "fits" if fullest.high <= memory.tile_limit else "tight"
    return {
        "name": f"IPU {number}",
        "bytes": [category.nbytes.central for category in memory.categories],
        "low": memory.total.low,
        "high": memory.total.high,
        "limit": memory.limit,
        "fullest": fullest.central * tiles,  # if all tiles were as full
        "tile": {
            "least": tile.least,
            "median": tile.median,
            "low": fullest.low,
            "central": fullest.central,
            "high": fullest.high,
            "limit": memory.tile_limit,
        },
        "always": memory.always_live.central,
        "rest": memory.total.central - memory.always_live.central,
        "cycles": ipu.cycles.busy,
        "word": fits if fullest.low <= memory.tile_limit else "does not fit",
    }


def _memory(memory: IpuMemory, strings: Strings) -> dict[str, Json]:
    calls = memory.calls
    return {
        "always": memory.always_live.central,
        "peak": _peak_step(memory),
        "blocks": [_block(block, strings) for block in memory.blocks],
        "calls": {
            "columns": pack_columns(
                {
                    "call": [call.call for call in calls],
                    "block": [call.memory_block for call in calls],
                    "held": [call.held for call in calls],
                }
            ),
            "held": [
                pack_columns(
                    {
                        "call": [value.call for value in call.held_values],
                        "lifetime": [value.lifetime for value in call.held_values],
                    }
                )
                for call in calls
            ],
        },
        "tensors": [
            {
                "name": strings(tensor.name),
                "type": strings(tensor.type),
                "bytes": tensor.nbytes,
                "category": strings(tensor.category),
                "maker": strings(tensor.maker),
                "line": strings(tensor.line),
                "reader": strings(tensor.reader),
                "always": tensor.category not in _PASSING,
            }
            for tensor in memory.peak.tensors
        ],
    }


def _peak_step(memory: IpuMemory) -> int | None:
    """The step of the peak among those of all calls; None: it is outside of calls."""
    start = 0
    for call in memory.calls:
        if call.call == memory.peak.call:
            return start + memory.peak.step
        start += len(memory.blocks[call.memory_block].activations)
    return None


def _block(block: MemoryBlock, strings: Strings) -> dict[str, Json]:
    """Memory during a block; of activations what its values do not add up to."""
    lifetimes = block.lifetimes
    names = [stem_and_number(lifetime.name) for lifetime in lifetimes]
    shapes: dict[tuple[int, int], int] = {}
    columns = {
        "stem": [strings(stem) for stem, _ in names],
        "number": [number for _, number in names],
        "shape": [
            shapes.setdefault((strings(value.type), value.nbytes), len(shapes))
            for value in lifetimes
        ],
        "made": [lifetime.made for lifetime in lifetimes],
        "steps": [v.last - v.made + 1 if v.last >= 0 else 0 for v in lifetimes],
        "more": [a - b for a, b in zip(block.activations, _live(block), strict=True)],
    }
    return {
        "block": block.block,
        "columns": pack_columns(columns),
        "shapes": pack_columns(
            {"type": [type_ for type_, _ in shapes], "nbytes": [nbytes for _, nbytes in shapes]}
        ),
        "temporaries": pack_repeated(block.temporaries),
    }


def _live(block: MemoryBlock) -> list[int]:
    """Bytes of the values of a block at each step."""
    changes = [0] * (len(block.activations) + 1)
    for value in block.lifetimes:
        changes[max(value.made, 0)] += value.nbytes
        if value.last >= 0:
            changes[value.last + 1] -= value.nbytes
    return list(accumulate(changes[:-1]))
