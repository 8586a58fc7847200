"""Train on one of three ranks of a mesh, and let one of them be lost: `python -m ...`.

Arguments: a folder where ranks meet, this rank, the lost one, the name of what the others wait in,
and that of the event. The others print what they notice.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ipu_dynamo import Options, Strategy, compile_inference, compile_training, rows_of_rank
from ipu_dynamo.errors import RankFailed
from tests.ranks.mesh import Pipeline

RANKS = 3
SHAPES = {"message": (1, 3), "exchange": (3, 1), "vote": (1, 3), "agreement": (1, 3)}
LIMIT = 10  # seconds without a sign of life


class Training:
    """Training on this rank, and inference with the same model."""

    def __init__(self, wait, lost):
        self.wait, self.is_lost = wait, dist.get_rank() == lost
        mesh = init_device_mesh("cpu", SHAPES[wait], mesh_dim_names=("replica", "ipu"))
        rows, _ = SHAPES[wait]
        common = {"engine": "eager", "replicas": rows, "device_iterations": 2, "mesh": mesh}
        common |= {"seed": 0}
        pipelined = Strategy("pipelined")
        self.options = Options(gradient_accumulation=6, strategy=pipelined, **common)
        # of two micro-batches: other ranks run both, and wait for the vote of the last stage's rank
        self.inference = Options(strategy=Strategy("sharded"), **common)
        self.model = Pipeline(3, backwards=wait == "vote" and lost == 0)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = compile_training(self.model, optimizer, self.options)
        self.infer = compile_inference(self.model, self.inference)

    def __call__(self, **settings):
        """A call of two steps."""
        return self.step(self.rows(self.options), **settings)

    def rows(self, options):
        x = torch.linspace(-1, 1, 2 * options.gradient_accumulation * options.replicas * 4)
        return rows_of_rank(x.view(-1, 4), options, training=options is self.options)

    def begin(self):
        """All that comes before the rank is lost."""
        if self.wait == "vote":
            self.infer(self.rows(self.inference))
        else:
            self()

    def go_on(self):
        """What the others wait in."""
        if self.wait == "vote":
            self.infer(self.rows(self.inference))
        elif self.wait == "agreement":
            self.infer.compile(self.rows(self.inference))
        else:
            self()


def is_killed(training):
    os.kill(os.getpid(), signal.SIGKILL)


def stands_still(training):
    os.kill(os.getpid(), signal.SIGSTOP)


def leaves(training):
    """The lost rank makes one call less."""


def reads_alone(training):
    if training.wait == "exchange":
        training.step.check_ranks()  # reading is no operation: all ranks have all weights
    else:
        (training.infer if training.wait == "vote" else training.step).read_weights()


EVENTS = {event.__name__: event for event in (is_killed, stands_still, leaves, reads_alone)}


def is_lost(training, event):
    training.begin()
    if training.is_lost:
        EVENTS[event](training)
    else:
        training.go_on()


def is_interrupted(training, _):
    """In a callback, after the first of two steps; then all go on."""

    def interrupt(iteration, _):
        if training.is_lost and iteration == 0:
            os.kill(os.getpid(), signal.SIGINT)

    training()
    try:
        training(on_send=interrupt)
    except (KeyboardInterrupt, RankFailed) as error:
        print(type(error).__name__, str(error).partition("\n")[0], flush=True)
    training()
    print(training.step.executable.step, "steps", flush=True)


def validates(training, _):
    """One rank alone, for longer than the limit, while the others wait for it."""
    training()
    end = time.monotonic() + 1.3 * LIMIT
    while training.is_lost and time.monotonic() < end:
        training.infer(training.rows(training.inference))
    training()
    print(training.step.executable.step, "steps", flush=True)


FUNCTIONS = {"is_interrupted": is_interrupted, "validates": validates}


def main(folder, rank, lost, wait, event):
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=int(rank), world_size=RANKS)
    training = Training(wait, int(lost))
    try:
        FUNCTIONS.get(event, is_lost)(training, event)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        assert all(parameter.isfinite().all() for parameter in training.model.parameters())
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
