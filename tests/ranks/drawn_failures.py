"""Draw models whose operators fail in some calls, at drawn replicas, stages and micro-batches."""

import random
from dataclasses import dataclass, replace

import torch
from torch import nn

from ipu_dynamo import (
    Block,
    Options,
    Strategy,
    collectives,
    compile_training,
    identity_loss,
    rows_of_rank,
)
from ipu_dynamo.errors import ExecutionError
from tests.ranks.struck import MAKING

WIDTH, ROWS, FAILURES = 4, 2, 5


class Gathers(nn.Module):
    """A layer on each IPU. One whose index is too large fails there."""

    def __init__(self, ipus, *, exchanges):
        super().__init__()
        with MAKING:
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(ipus))
        self.exchanges = exchanges

    def forward(self, x, index):
        for ipu, layer in enumerate(self.layers):
            with Block(str(ipu), ipu_id=ipu):
                x = layer(x).tanh()
                if self.exchanges and ipu == 0:
                    x = collectives.all_reduce(x)
                x = x + x.gather(1, index[:, ipu : ipu + 1])
                if ipu == len(self.layers) - 1:
                    return identity_loss(x.square(), "mean")
        return x


@dataclass(frozen=True)
class Case:
    """A model, its options without a mesh, the mesh, and where a call fails: `places` has the
    replica, the stage and the micro-batch of a step for each failing call."""

    ipus: int
    exchanges: bool
    options: Options
    mesh: tuple[int, int]
    places: tuple[tuple[int, int, int], ...]


def drawn(seed):
    """The case of this number."""
    draw = random.Random(seed)
    rows, columns = draw.choice([(2, 1), (1, 2), (2, 2), (3, 1)])
    ipus, replicas = draw.randint(columns, 3), rows * draw.randint(1, 2)
    strategy = draw.choice(["pipelined", "sharded"]) if ipus > 1 else "sharded"
    options = Options(
        "eager",
        replicas=replicas,
        gradient_accumulation=draw.randint(2 * ipus - 1, 6),
        device_iterations=draw.randint(1, 2),
        strategy=Strategy(strategy),
        workers=draw.choice([1, None]),
        seed=seed,
    )
    micro_batches = options.gradient_accumulation * options.device_iterations
    places = tuple(
        (draw.randrange(replicas), draw.randrange(ipus), draw.randrange(micro_batches))
        for _ in range(FAILURES)
    )
    return Case(ipus, draw.random() < 0.3, options, (rows, columns), places)


def made(case, *, fails=True, mesh=None):
    """Calls that fail between complete ones, on this rank; without a mesh in one process.

    Returns:
        The fields of each error, and at the end all weights and states by name.
    """
    options = replace(case.options, mesh=mesh)
    model = Gathers(case.ipus, exchanges=case.exchanges)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step, errors = compile_training(model, optimizer, options), []

    def call(number, place=None):
        micro_batches = options.gradient_accumulation * options.device_iterations
        x = torch.randn(
            micro_batches, options.replicas, ROWS, WIDTH,
            generator=torch.Generator().manual_seed(number),
        )  # fmt: skip
        index = torch.zeros(*x.shape[:3], case.ipus, dtype=torch.int64)
        if place is not None:
            replica, stage, micro_batch = place
            index[micro_batch, replica, 1, stage] = 99
        step(*(rows_of_rank(tensor.flatten(0, 2), options) for tensor in (x, index)))

    for number, place in enumerate(case.places):
        call(number)
        try:
            if fails:
                call(100 + number, place)
        except ExecutionError as error:
            errors.append((error.stage, error.micro_batch, error.where, error.rank))
    call(len(case.places))
    step.read_weights()
    step.read_optimizer_state()
    tensors = dict(model.state_dict())
    for number, state in enumerate(optimizer.state.values()):
        tensors |= {f"{name} {number}": tensor for name, tensor in state.items()}
    return errors, {name: tensor.clone() for name, tensor in tensors.items()}


def check(case, found):
    """Compare what ranks have made with one process.

    Args:
        found: what `made` returned on each rank.
    """
    errors, expected = made(case)
    assert len(errors) == FAILURES
    if case.options.device_iterations == 1:  # else steps before the failure are complete
        _, expected = made(case, fails=False)
    rows, columns = case.mesh
    for of_rank, tensors in found:
        for one, (*place, rank), failing in zip(errors, of_rank, case.places, strict=True):
            assert place == [*one[:3]], case
            row = failing[0] * rows // case.options.replicas
            assert rank == row * columns + failing[1] * columns // case.ipus, case
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), f"{name} of {case}"
