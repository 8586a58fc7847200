"""Train on handwritten digits with one program on several processes.

    torchrun --standalone --nproc-per-node 4 -m examples.digits_ranks

Two replicas of a pipeline of four virtual IPUs run on 1, 2 or 4 processes. All print the same
accuracy: the weights are the same to the last bit.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from examples.digits import Network, load
from ipu_dynamo import BeginBlock, Options, Strategy, compile_training, rows_of_rank

REPLICAS, ACCUMULATION, MICRO_BATCH = 2, 8, 4


class Training(Network):
    """The network with its loss, each layer on an IPU of its own."""

    def __init__(self) -> None:
        super().__init__()
        for ipu, layer in enumerate([self.conv1, self.conv2, self.hidden, self.output]):
            BeginBlock(layer, ipu_id=ipu)


def mesh_of_ranks() -> DeviceMesh | None:
    """Half of the ranks for each block of two IPUs; without torchrun there is no mesh."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return None
    shape = (ranks // 2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "ipu"))


def main(epochs: int = 4) -> float:
    """Train; return the accuracy on digits that were held back."""
    torch.manual_seed(0)
    train, held_back = load()
    model = Training()
    options = Options(
        replicas=REPLICAS,
        gradient_accumulation=ACCUMULATION,
        strategy=Strategy("pipelined"),
        mesh=mesh_of_ranks(),
    )
    step = compile_training(model, torch.optim.Adam(model.parameters(), lr=3e-3), options)
    rows = REPLICAS * ACCUMULATION * MICRO_BATCH
    generator = torch.Generator().manual_seed(1)  # all ranks draw the same batches
    for _ in range(epochs):
        for images, labels in DataLoader(
            train, rows, shuffle=True, drop_last=True, generator=generator
        ):
            step(rows_of_rank(images, options), rows_of_rank(labels, options))
    step.read_weights()  # with a dimension `ipu` all ranks of a row do this together
    images, labels = held_back.tensors
    with torch.no_grad():
        accuracy: float = (model(images).argmax(1) == labels).float().mean().item()
    if options.mesh is None or dist.get_rank() == 0:
        print(f"accuracy {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    main(parser.parse_args().epochs)
    if dist.is_initialized():
        dist.destroy_process_group()
