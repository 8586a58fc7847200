"""Keep weights in the order of a library's own, as long as they do not change."""

from collections.abc import Sequence

from torch import Tensor

from ipu_dynamo.ops.private.native import onednn_pack
from ipu_dynamo.program.recipe import Packed
from ipu_dynamo.runtime.engines.stage import Stage


def packing(run: Stage, packed: Sequence[Packed]) -> Stage:
    """`run`, which takes packed weights after its own inputs, on these inputs alone.

    Each weight that it is called with is packed once, and again when it has been written.
    """
    packings: dict[tuple[int, int], tuple[Tensor, int, Tensor]] = {}

    def stage(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        further = []
        for one in packed:
            weight = arguments[one.source]
            key, version = (id(weight), one.rows), weight._version
            entry = packings.get(key)
            if entry is None or entry[1] != version:
                entry = weight, version, onednn_pack(weight.contiguous(), one.rows)
                packings[key] = entry  # it keeps the weight, too, so that no other gets its id
            further.append(entry[2])
        return run([*arguments, *further])

    return stage
