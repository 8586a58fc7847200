"""Train on a rank that torchrun starts, and be struck at a counted place: `python -m ...`.

Arguments: the name of a function, a folder, the mesh as REPLICASxIPUS, the rank that is struck, and
what the function takes besides. Places are counted in calls of this package's functions on the main
thread, so no clock decides where a rank is struck.
"""

import faulthandler
import os
import select
import signal
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path
from threading import Lock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ipu_dynamo
from ipu_dynamo import (
    Block,
    Options,
    Strategy,
    compile_training,
    latest_checkpoint,
    load_checkpoint,
    rows_of_rank,
    save_checkpoint,
)
from ipu_dynamo.errors import RankFailed

ENDS = 240  # seconds
PACKAGE = str(Path(ipu_dynamo.__file__).parent)
CALLS = 6  # of a training that is killed
MAKING = Lock()  # torch's generator is one for all threads
PLACES = 20  # of a call in which one rank after the other is interrupted


class Net(nn.Module):
    """A layer with dropout on each of two IPUs."""

    def __init__(self):
        super().__init__()
        with MAKING:
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        for ipu, layer in enumerate(self.layers):
            with Block(str(ipu), ipu_id=ipu):
                x = nn.functional.dropout(layer(x).tanh(), 0.2)
                if ipu == 1:
                    return ipu_dynamo.identity_loss(x.square(), "mean")
        return x


class Training:
    """Training on this rank; without a mesh that of one process."""

    def __init__(self, mesh=None):
        self.options = Options(
            engine="eager",
            replicas=2,
            gradient_accumulation=3,
            strategy=Strategy("pipelined"),
            seed=3,
            mesh=mesh,
        )
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step = compile_training(self.model, self.optimizer, self.options)

    def rows(self, number):
        """What the call of this number takes: two rows for each micro-batch."""
        drawn = torch.Generator().manual_seed(number)
        return rows_of_rank(torch.randn(2 * 3 * 2, 6, generator=drawn), self.options)

    def own(self):
        """The weights that this rank updates, and the number of steps."""
        ipus = range(2) if self.options.mesh is None else [self.options.mesh.get_local_rank("ipu")]
        if self.options.grid[1] == 1:
            ipus = range(2)
        named = {
            f"{ipu} {name}": tensor.detach().clone()
            for ipu in ipus
            for name, tensor in self.model.layers[ipu].named_parameters()
        }
        return {"steps": self.step.executable.step, "weights": named}

    def all(self):
        """All weights and states, by their names; all ranks read them together."""
        self.step.read_weights()
        self.step.read_optimizer_state()
        named = dict(self.model.state_dict())
        for number, state in enumerate(self.optimizer.state.values()):
            named |= {f"{name} {number}": tensor for name, tensor in state.items()}
        return {name: tensor.clone() for name, tensor in named.items()}


class Places:
    """Counts places within a block, and strikes at one of them.

    Args:
        at: the number of the place; 0 for none. The end, if there are fewer.
        strike: is called there.
        begins: the name of the function whose first call is place 0.
    """

    def __init__(self, at=0, strike=None, begins="__call__"):
        self.at, self.strike, self.begins = at, strike, begins
        self.count = -1

    def __enter__(self):
        sys.setprofile(self._look)
        return self

    def __exit__(self, kind, *_):
        sys.setprofile(None)
        if kind is None and max(self.count, 0) < self.at:  # this time it has waited less
            self.strike()

    def _look(self, frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name == "<genexpr>":
            return  # it may be deleted, where Python drops errors; no signal comes in there
        if self.count >= 0 or code.co_name == self.begins:
            self.count += 1
            if self.count == self.at > 0:
                self.strike()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def interrupt_torchrun():
    """Interrupt torchrun, as Ctrl-C does, and wait here until it has passed that on."""
    arrived, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    os.kill(os.getppid(), signal.SIGINT)
    select.select([arrived], [], [], ENDS)


def killed(mesh, folder, rank, at):
    """Go on from the latest checkpoint to the last call. The first time a rank is killed."""
    training = Training(mesh)
    first = 0
    if latest_checkpoint(folder / "runs") is not None:
        first = load_checkpoint(folder / "runs", training.step)["call"]
    is_struck = dist.get_rank() == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    places = Places(int(at) if is_struck else 0, kill)
    for number in range(first, CALLS):
        if number == 1:
            places.__enter__()
        training.step(training.rows(number))
        if number == CALLS - 1:
            places.__exit__(None)
        save_checkpoint(folder / "runs", training.step, {"call": number + 1})
    found = {"first": first, "places": places.count, "tensors": training.all()}
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")


def interrupted(mesh, folder, rank, begins, part):
    """Train until torchrun is interrupted: in the fourth call, at a part of its places."""
    training = Training(mesh)
    for number in range(2):
        training.step(training.rows(number))
    with Places(begins=begins) as places:
        training.step(training.rows(2))
    at = 1 + int(float(part) * places.count) if dist.get_rank() == rank else 0
    try:
        with Places(at, interrupt_torchrun, begins):
            training.step(training.rows(3))
        for number in count(4):
            training.step(training.rows(number))
    finally:
        torch.save(training.own(), folder / f"rank{dist.get_rank()}.pt")


def interrupted_calls(training, first, places, begins):
    """Make calls from a number on; what becomes of each, and all weights after one more.

    Args:
        places: for each call, the place at which this rank is interrupted; 0: it is not.
    """
    outcomes = []
    for number, at in enumerate(places, first):
        before, ends = training.step.executable.step, "returns"
        try:
            with Places(at, interrupt, begins):
                training.step(training.rows(number))
        except (KeyboardInterrupt, RankFailed) as error:
            ends = type(error).__name__
        outcomes.append((ends, at > 0, training.step.executable.step - before))
    training.step(training.rows(first + len(places)))
    return {"outcomes": outcomes, "tensors": training.all()}


def interrupted_alone(mesh, folder, rank, begins):
    """Interrupt this rank alone, or another one, in one call after the other."""
    training = Training(mesh)
    for number in range(2):
        training.step(training.rows(number))
    with Places(begins=begins) as places:
        training.step(training.rows(2))
    own = [
        1 + place * places.count // PLACES
        if place % dist.get_world_size() == dist.get_rank()
        else 0
        for place in range(PLACES)
    ]
    found = interrupted_calls(training, 3, own, begins)
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")


def fails(mesh, folder, rank, seed):
    """Make calls that fail in a drawn case."""
    from tests.ranks.drawn_failures import drawn, made  # which takes the lock of this file

    torch.save(made(drawn(int(seed)), mesh=mesh), folder / f"rank{dist.get_rank()}.pt")


FUNCTIONS = {f.__name__: f for f in (killed, interrupted, interrupted_alone, fails)}


def run_torchrun(name, folder, shape, *arguments, restarts=0):
    """Start a function of this file on all ranks; returns torchrun's exit code and all output.

    Ranks that torchrun starts again need a store of their own: in that of torchrun they find the
    addresses of those before, and cannot connect. At the end no process that knows this folder is
    alive.
    """
    rows, columns = map(int, shape.split("x"))
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={rows * columns}"]
    environment = {
        "OMP_NUM_THREADS": "1",
        "IPU_DYNAMO_RANK_TIMEOUT": "10",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", *launch, f"--max-restarts={restarts}", "-m", "tests.ranks.struck",
         name, str(folder), shape, *map(str, arguments)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        try:
            output, _ = process.communicate(timeout=ENDS)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"not ended: {(late.output or b'').decode()}") from None
        assert not (left := _alive(folder)), f"processes are left: {left}\n{output}"
        return process.returncode, output
    finally:
        for number in {*_alive(folder), *([process.pid] if process.poll() is None else [])}:
            os.kill(number, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def _alive(folder):
    """The processes whose arguments have the folder; torchrun gives each rank a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:  # it has ended
            continue
    return found


def main(name, folder, shape, rank, *arguments):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have let it be ignored
    faulthandler.dump_traceback_later(ENDS - 10)  # where it waits, if it does not end
    torch.set_num_threads(1)
    sizes = tuple(map(int, shape.split("x")))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "ipu"))
    FUNCTIONS[name](mesh, Path(folder), int(rank), *arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
