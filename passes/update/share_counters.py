"""Read one counter for all parameters that step together with equal counts.

Before   %t1, %t2: i64[] of two parameters of a group, both 0;   %a = aten.add(%t1, 1);
         %b = aten.add(%t2, 1)
After    %a = aten.add(%t1, 1);   %b = aten.add(%t1, 1)
Keeps    every result while the counts are equal. `TracedOptimizer` checks a state that it reads.
Source   torch.optim, which counts the steps of each parameter by itself.
"""

from typing import Any

from ipu_dynamo.capture.update.world import World
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.update.step_graphs import each_step, numbers_without_tensors
from ipu_dynamo.passes.update_levels import UpdateGraphs, UpdateStep


def _share(step: UpdateStep) -> bool:
    free, leaves = numbers_without_tensors(step), step.leaves
    changed = False
    for paths in alike_counters(step.world):
        first, *others = [path for path in paths if path in free] or paths[:1]
        for path in others:
            changed |= bool(leaves[path].users)
            leaves[path].replace_all_uses_with(leaves[first])
    return changed


def alike_counters(world: World) -> list[list[str]]:
    """Return paths of counters with equal counts, for parameters that step together."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for leaf in world.leaves:
        if leaf.parameter is None or not (leaf.is_number or world.is_known(leaf)):
            continue
        value = leaf.value.item() if leaf.is_tensor else leaf.value
        dtype = leaf.value.dtype if leaf.is_tensor else type(leaf.value)
        found.setdefault((leaf.group, leaf.key, dtype, value), []).append(leaf.path)
    return list(found.values())


class ShareCounters(Pass):
    """The pass."""

    level = "update"

    def __call__(self, update: UpdateGraphs) -> bool:
        return each_step(update, _share)
