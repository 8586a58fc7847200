"""Call each name of `horovod.torch` on three instances, and show the results."""

import horovod.torch as hvd
import torch

import popdist

SHOWN = []


def show(name: str, value: object) -> None:
    SHOWN.append(f"{name} {value.tolist() if isinstance(value, torch.Tensor) else value}")


def refused(name: str, call, *arguments, **keywords) -> None:
    try:
        call(*arguments, **keywords)
    except ValueError as error:
        show(name, error)


hvd.init()
popdist.init()
rank = hvd.rank()
show(
    "place", (hvd.size(), hvd.local_size(), hvd.local_rank() == rank == popdist.getInstanceIndex())
)
own = torch.tensor([rank + 1.0, 10.0])
show("mean", hvd.allreduce(own))
show("sum", hvd.allreduce(own, op=hvd.Sum))
show("old sum", hvd.allreduce(own, average=False, name="name"))
show("own", own.tolist() == [rank + 1.0, 10.0])
show("whole", hvd.allreduce(torch.tensor(rank * 2, dtype=torch.int16)))
show("half", hvd.allreduce(torch.full((1,), 0.1 * rank, dtype=torch.float16)).dtype)
show("group", [one.tolist() for one in hvd.grouped_allreduce([own, own[0]], op=hvd.Average)])
show("rows", hvd.allgather(torch.full((rank, 2), rank)))
show("root", hvd.broadcast(own, root_rank=1))
weights = torch.nn.Linear(1, 1)
torch.nn.init.constant_(weights.weight, rank)
torch.nn.init.constant_(weights.bias, -rank)
hvd.broadcast_parameters(weights.state_dict(), root_rank=2)
show("weights", [weights.weight.item(), weights.bias.item()])
state = {"step": rank, "none": None, "state": {0: {"sum": torch.tensor(rank)}}}
hvd.broadcast_parameters(state, root_rank=1)
show("state", state["state"])
show("step", state["step"] == rank)
hvd.broadcast_parameters(None, root_rank=0)
refused("shapes", hvd.allreduce, torch.zeros(1 + rank // 2))
refused("types", hvd.broadcast, torch.zeros(1, dtype=(torch.int32, torch.int64)[rank // 2]), 0)
refused("count", hvd.broadcast_parameters, [own] * (1 + rank // 2), 0)
refused("operations", (hvd.allreduce, hvd.allgather)[rank // 2], own)
refused("nobody", hvd.broadcast, own, root_rank=3)
show("afterwards", hvd.allreduce(own))
pair = popdist.execute_on_instances({0, 2}, hvd.allreduce, own)
show("pair", pair is None if rank == 1 else pair.tolist() == [2.0, 10.0])
print(f"{' | '.join(SHOWN)}", flush=True)
