"""Let some of three instances act together, and connect them a second time."""

import torch
import torch.distributed as dist

import popdist
from popdist._collectives import describe, gather
from popdist._instances import acting_ranks

DESCRIBED: list[str] = []


def total() -> str:
    """The sum of the indices of those that act together."""
    popdist.synchronize()
    own = [torch.tensor(popdist.getInstanceIndex())]
    found = gather(own, describe("total", own, acting_ranks()))
    return f"{sum(int(one) for (one,) in found.values())} over {len(found)}"


index = popdist.getInstanceIndex()
for _ in range(2):
    popdist.init()
    popdist.init()
    assert dist.get_world_size() == popdist.getNumInstances()
    DESCRIBED.append(total())
    for instances in ({0, 2}, {0, 1}, {1, 2}):
        result = popdist.execute_on_instances(instances, total)
        if index not in instances:
            assert result is None
        else:
            DESCRIBED.append(result)
    popdist.finalizeBackend()
    assert not dist.is_initialized()

dist.init_process_group("gloo")  # another one's, which stays
popdist.init()
popdist.finalizeBackend()
assert dist.is_initialized()
dist.barrier()
dist.destroy_process_group()
print(f"instance {index}: {', '.join(DESCRIBED)}", flush=True)
