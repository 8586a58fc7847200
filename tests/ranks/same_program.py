"""Compile one program on all ranks that torchrun starts, and write its text.

    torchrun --standalone --nproc-per-node 3 -m tests.ranks.same_program FOLDER [--other 2]

Each rank writes the program, or the error that it got, into a file of its name. `--other` is a rank
whose model has one line that is another.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ipu_dynamo import Options, compile_training
from ipu_dynamo.errors import RanksDiffer
from tests.ranks.mesh import Pipeline


class OtherPipeline(Pipeline):
    def forward(self, x):
        return super().forward(x.abs())


def text_of(mesh, model=Pipeline):
    """The text of the program, which is compiled for three replicas."""
    options = Options(engine="eager", replicas=3, gradient_accumulation=4, seed=3, mesh=mesh)
    model = model()
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    step.compile(torch.zeros(12 if mesh is None else 4, 4))
    return step.program.text()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--other", type=int)
    given = parser.parse_args()
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("replica",))
    rank = dist.get_rank()
    try:
        made = text_of(mesh, OtherPipeline if rank == given.other else Pipeline)
    except RanksDiffer as error:
        made = f"RanksDiffer: {error}"
    (given.folder / f"rank{rank}.txt").write_text(made)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
