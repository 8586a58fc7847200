"""Run checks on one of several processes: `python -m tests.ranks.gloo_rank`.

Arguments: a folder where ranks meet, the rank, the mesh as ROWSxCOLUMNS, and names of functions,
which get the rank's transport.
"""

import sys

import torch
import torch.distributed as dist

from ipu_dynamo.errors import RankLost
from ipu_dynamo.program import TensorType
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.ranks.torch_transport import TorchTransport
from ipu_dynamo.runtime.ranks.wires import Wires
from tests.ranks.transport_checks import CHECKS, filled

INTERRUPTED, LOST = 3, 4  # exit codes


def wait_in_a_collective(transport):
    transport.maximum("mesh", torch.tensor([0]))


def wait_for_a_message(transport):
    wires = Wires(transport, 0)
    wires.expect(1, 0, 0, 1, TensorType(torch.float32, ()))
    wires.wait(1, 0, 0)


def waiting(wait):
    """Let the first rank wait for the second one, which waits for the end of the first."""

    def run(transport):
        try:
            if transport.share.rank:
                transport.receive(0, (1, 0, 0), filled(0)).wait()
            print("waits", flush=True)
            wait(transport)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            sys.exit(INTERRUPTED)
        except RankLost as error:
            print("RankLost", error, flush=True)
            sys.exit(LOST)

    return run


FUNCTIONS = {check.__name__: check for check in CHECKS}
FUNCTIONS |= {wait.__name__: waiting(wait) for wait in (wait_in_a_collective, wait_for_a_message)}


def main(folder, rank, mesh, *names):
    torch.set_num_threads(1)
    rows, columns = map(int, mesh.split("x"))
    ranks, rank = rows * columns, int(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    # the mesh has the ranks in another order than the world
    place = (rank + 1) % ranks
    order = [(place - 1) % ranks for place in range(ranks)]
    transport = TorchTransport(Share(rows, columns, *divmod(place, columns)), order)
    transport.maximum("mesh", torch.tensor([0]))  # its first use connects it
    for name in names:
        FUNCTIONS[name](transport)
        print(f"{name} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
