"""Train on one of the ranks of a mesh, and fail in some way: `python -m ...`.

Arguments: a folder where ranks meet, the rank, the mesh as REPLICASxIPUS, and the name of a
function. The last rank fails, and the others print what they notice.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ipu_dynamo import Options, Strategy, compile_training, rows_of_rank
from ipu_dynamo.errors import RankFailed
from tests.ranks.mesh import Pipeline


class Training:
    """Training on this rank."""

    def __init__(self, rank, rows, columns):
        mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("replica", "ipu"))
        self.options = Options(
            engine="eager",
            replicas=rows,
            device_iterations=2,
            gradient_accumulation=6,
            strategy=Strategy("pipelined"),
            mesh=mesh,
        )
        self.rank, self.fails = rank, rank == rows * columns - 1
        self.model = Pipeline(3)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = compile_training(self.model, optimizer, self.options)

    def __call__(self, **settings):
        """A call of two steps."""
        x = torch.linspace(-1, 1, 12 * self.options.replicas * 4).view(-1, 4)
        return self.step(rows_of_rank(x, self.options), **settings)


def is_killed(training):
    training()
    if training.fails:
        os.kill(os.getpid(), signal.SIGKILL)
    training()


def stands_still(training):
    training()
    if training.fails:
        os.kill(os.getpid(), signal.SIGSTOP)
    training()


def leaves(training):
    training()
    training()
    if not training.fails:
        training()


def reads_alone(training):
    training()
    if training.fails:
        training.step.read_weights()
    else:
        training()


def is_interrupted(training):
    """In a callback, after the first of two steps; then all go on."""

    def interrupt(iteration, _):
        if training.fails and iteration == 0:
            os.kill(os.getpid(), signal.SIGINT)

    training()
    try:
        training(on_send=interrupt)
    except (KeyboardInterrupt, RankFailed) as error:
        print(type(error).__name__, str(error).partition("\n")[0], flush=True)
    training()
    print(training.step.executable.step, "steps", flush=True)


FUNCTIONS = {f.__name__: f for f in (is_killed, stands_still, leaves, reads_alone, is_interrupted)}


def main(folder, rank, shape, name):
    torch.set_num_threads(1)
    rows, columns = map(int, shape.split("x"))
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=int(rank), world_size=rows * columns)
    training = Training(int(rank), rows, columns)
    try:
        FUNCTIONS[name](training)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        assert all(parameter.isfinite().all() for parameter in training.model.parameters())
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
