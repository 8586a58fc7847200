"""Train and infer a small model in float64, micro-batch by micro-batch, as PopTorch says.

This file is a reference for the package, so it must not import it.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Batching:
    """Device iterations, accumulation, replicas, the replicas of an input group, whether these are
    strided, and rows of a micro-batch."""

    iterations: int
    accumulation: int
    replicas: int
    group_size: int
    orthogonal: bool
    rows: int

    @property
    def groups(self) -> int:
        return self.replicas // self.group_size

    @property
    def all_rows(self) -> int:
        return self.iterations * self.accumulation * self.groups * self.rows

    def group_of(self, replica: int) -> int:
        return replica % self.groups if self.orthogonal else replica // self.group_size

    def rows_of(self, tensor: Tensor, iteration: int, step: int, replica: int) -> Tensor:
        """What a replica reads: rows lie by iteration, then step, then group."""
        block = (iteration * self.accumulation + step) * self.groups + self.group_of(replica)
        return tensor[block * self.rows : (block + 1) * self.rows]


class Net(nn.Module):
    """Two layers, running statistics, a loss, and a nested value."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 2)
        self.loss = nn.MSELoss(reduction=reduction)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.fc1(x))
        if self.training:
            self.seen.mul_(0.5).add_(hidden.detach().sum(0))
        out = self.fc2(hidden)
        return {"outs": (out, [hidden * 2, 7]), "loss": self.loss(out, y)}


@dataclass
class Recorded:
    """What a name had in every micro-batch, by iteration, step and replica, and at the end."""

    values: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    final: dict[int, Tensor] = field(default_factory=dict)  # by replica, if not the last one above

    def joined(self, b: Batching, mode: str, period: int) -> Tensor:
        """The tensor that comes back."""
        last = b.iterations - 1, b.accumulation - 1
        replicas = range(b.replicas)
        places = [(d, a) for d in range(b.iterations) for a in range(b.accumulation)]
        if mode == "Sum":
            blocks = [sum(self.values[*place, r] for place in places) for r in replicas]
        elif mode == "Final":
            blocks = [self.final.get(r, self.values[*last, r]) for r in replicas]
        else:
            every = period if mode == "EveryN" else 1
            kept = [place for place in places if (place[0] + 1) % every == 0]
            blocks = [self.values[*place, r] for place in kept for r in replicas]
        if len(blocks) == 1:
            return blocks[0]
        return torch.stack(blocks) if blocks[0].dim() == 0 else torch.cat(blocks)


def run(
    model: Net, calls: list[tuple[Tensor, Tensor]], b: Batching, settings: dict[str, Any]
) -> list[dict[str, Recorded]]:
    """What every call of a loop of plain PyTorch gives, by name.

    Args:
        model: trained in place; in float64 meanwhile.
        settings: lr (None: inference), scale of the loss, mean (or sum), early: whether the mean
            over replicas is taken before the backward pass, momentum.
    """
    lr = settings["lr"]
    replicas = [copy.deepcopy(model).double() for _ in range(b.replicas)]
    names = [name for name, _ in model.named_parameters()]
    velocity = {name: torch.zeros(()).double() for name in names}
    results = []
    for x, y in calls:
        found: dict[str, Recorded] = {}

        def keep(name: str, place: tuple[int, int, int], value: Tensor) -> None:
            found.setdefault(name, Recorded()).values[place] = value.detach().clone()  # noqa: B023

        for d in range(b.iterations):
            sums = {name: torch.zeros(()).double() for name in names}
            for a in range(b.accumulation):
                for r, one in enumerate(replicas):
                    place = d, a, r
                    rows = [b.rows_of(t, *place).double() for t in (x, y)]
                    inner = torch.nn.functional.linear(rows[0], one.fc1.weight, one.fc1.bias)
                    returned = one(*rows)
                    (out, (double, _)), loss = returned["outs"], returned["loss"]
                    for name, value in {
                        "input": rows[0],
                        "input/1": rows[1],
                        "fc1/Add:0": inner,
                        "fc1/MatMul:0": rows[0] @ one.fc1.weight.T,
                        "fc2/Add:0": out,
                        "out": out,
                        "double": double,
                        "loss": loss,
                        "seen": one.seen,
                        **dict(one.named_parameters()),
                    }.items():
                        keep(name, place, value)
                    if lr is None:
                        continue
                    scale = settings["scale"] / (b.replicas if settings["early"] else 1)
                    wanted = [*one.parameters(), out]
                    *gradients, of_out = torch.autograd.grad(loss * scale, wanted)
                    keep("Gradient___fc2/Add:0", place, of_out)
                    for name, gradient in zip(names, gradients, strict=True):
                        keep(f"Gradient___{name}", place, gradient)
                        sums[name] = sums[name] + gradient
            if lr is None:
                continue
            for name in names:
                gradient = sums[name] / settings["scale"]
                if settings["mean"]:
                    gradient = gradient / b.accumulation
                    gradient = gradient if settings["early"] else gradient / b.replicas
                velocity[name] = settings["momentum"] * velocity[name] + gradient
                for one in replicas:
                    one.get_parameter(name).data -= lr * velocity[name]
            for a in range(b.accumulation):
                for r, one in enumerate(replicas):
                    for name, parameter in one.named_parameters():
                        keep(f"UpdatedVar___{name}", (d, a, r), parameter)
        for r, one in enumerate(replicas):
            for name, value in (*one.named_parameters(), *one.named_buffers()):
                found[name].final[r] = value.detach().clone()
        results.append(found)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(replicas[0].get_parameter(name))
    return results
