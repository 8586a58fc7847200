"""Train on handwritten digits with one program on several processes.

    torchrun --standalone --nproc-per-node 4 -m examples.digits_ranks --mesh 2x2

Four replicas of a pipeline of four virtual IPUs run on one process, or on a mesh of `replica x ipu`
ranks. All print the same: losses, and digests of weights and of the optimiser's states, which are
the same to the last bit.
"""

import argparse
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from examples.digits import Network, load
from ipu_dynamo import BeginBlock, Options, Strategy, compile_training, rows_of_rank

REPLICAS, ACCUMULATION, MICRO_BATCH = 4, 8, 4


class Training(Network):
    """The network with its loss, each layer on an IPU of its own."""

    def __init__(self) -> None:
        super().__init__()
        for ipu, layer in enumerate([self.conv1, self.conv2, self.hidden, self.output]):
            BeginBlock(layer, ipu_id=ipu)


def mesh_of(text: str | None) -> DeviceMesh | None:
    """The mesh that `2x2` describes: ranks for blocks of replicas, and for blocks of IPUs."""
    if text is None:
        return None
    rows, columns = map(int, text.split("x"))
    return init_device_mesh("cpu", (rows, columns), mesh_dim_names=("replica", "ipu"))


def of_all_replicas(losses: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The losses of all replicas; each rank has those of its own."""
    if mesh is None:
        return losses
    parts = [torch.empty_like(losses) for _ in range(mesh["replica"].size())]
    dist.all_gather(parts, losses, group=mesh.get_group("replica"))
    return torch.cat(parts)


def digest(tensor: Tensor) -> str:
    """Says whether two tensors have the same bits."""
    return sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def main(mesh: DeviceMesh | None = None, epochs: int = 2) -> list[str]:
    """Train; return a line for the losses of each step, and one for each weight and state."""
    torch.manual_seed(0)
    train, _ = load()
    model = Training()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    options = Options(
        replicas=REPLICAS,
        gradient_accumulation=ACCUMULATION,
        strategy=Strategy("pipelined"),
        mesh=mesh,
    )
    step = compile_training(model, optimizer, options)
    rows = REPLICAS * ACCUMULATION * MICRO_BATCH
    generator = torch.Generator().manual_seed(1)  # all ranks draw the same batches
    loader = DataLoader(train, rows, shuffle=True, drop_last=True, generator=generator)
    lines = []
    for _ in range(epochs):
        for images, labels in loader:
            losses = step(rows_of_rank(images, options), rows_of_rank(labels, options))
            numbers = of_all_replicas(losses.reshape(-1), mesh).tolist()
            lines.append(f"losses {' '.join(number.hex() for number in numbers)}")
    step.read_weights()  # with a dimension `ipu` all ranks of a row do this together
    step.read_optimizer_state()
    for name, parameter in model.named_parameters():
        lines.append(f"{name} {digest(parameter)}")
        lines += [f"  {key} {digest(value)}" for key, value in optimizer.state[parameter].items()]
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", help="ranks for replicas x ranks for IPUs, such as 2x2")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    of_ranks = mesh_of(arguments.mesh)
    made = main(of_ranks, arguments.epochs)
    if of_ranks is None or dist.get_rank() == 0:
        print(*made, sep="\n")
    if of_ranks is not None:
        dist.destroy_process_group()
