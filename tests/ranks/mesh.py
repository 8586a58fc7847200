"""Make meshes of ranks that are not there, and programs that ranks share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ipu_dynamo import Block, identity_loss


@contextmanager
def world(ranks: int, rank: int = 0) -> Iterator[None]:
    """Be one of several ranks; messages to the others are lost."""
    distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def mesh(*shape: int, names: tuple[str, ...] = ("replica", "ipu")) -> DeviceMesh:
    """A mesh of all ranks of this world."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])


class Pipeline(nn.Module):
    """A linear layer on each IPU, with the mean square as its loss.

    Args:
        backwards: the last IPU has the first layer.
    """

    def __init__(self, ipus: int = 2, width: int = 4, *, backwards: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(ipus))
        self.backwards = backwards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            with Block(str(number), ipu_id=last - number if self.backwards else number):
                x = layer(x).tanh()
                if number == last:
                    return identity_loss(x.square(), "mean")
        return x
