"""Make models that loop and branch, each beside the plain Python that it stands for."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.map import map as map_rows

import ipu_dynamo

WIDTH, ROWS = 3, 4


class Net(nn.Module):
    """Parameters, a buffer, and two ways to compute with them.

    Args:
        forward: in operators that loop and branch.
        plain: in Python; computes the same.
    """

    def __init__(
        self,
        forward: Callable[["Net", Tensor], list[Tensor]],
        plain: Callable[["Net", Tensor], list[Tensor]],
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 1.5]))
        self.ours, self.theirs = forward, plain

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.ours(self, x)

    def plain(self, x: Tensor) -> list[Tensor]:
        return self.theirs(self, x)


def _for(m: Net, x: Tensor) -> Tensor:
    def body(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a.mul_(m.scale)  # by value: nobody else sees it
        return b, torch.tanh(m.fc(a)) + x

    a, b = ipu_dynamo.for_loop(5, body, [x, x * 2])
    return a * b


def _plain_for(m: Net, x: Tensor) -> Tensor:
    a, b = x, x * 2
    for _ in range(5):
        a, b = b, torch.tanh(m.fc(a * m.scale)) + x
    return a * b


def _cond(m: Net, x: Tensor) -> Tensor:
    y = m.fc(x)
    small, large = ipu_dynamo.cond(
        y.sum() > 0,
        lambda a: (m.gate(a), a),
        [y],
        lambda a, b: [torch.sin(a) * m.scale, torch.exp(-b * b) + a],
        [y, x],
    )
    return small * large


def _plain_cond(m: Net, x: Tensor) -> Tensor:
    y = m.fc(x)
    if y.sum() > 0:
        return m.gate(y) * y
    return torch.sin(y) * m.scale * (torch.exp(-x * x) + y)


def _torch_cond(m: Net, x: Tensor) -> Tensor:
    y = torch.cond(
        x.sum() > 0,
        lambda t: {"y": torch.relu(m.fc(t["x"])) + torch.tensor(1.0)},
        lambda t: {"y": t["x"].sin() * m.gate.bias},
        ({"x": x},),
    )
    return y["y"]


def _plain_torch_cond(m: Net, x: Tensor) -> Tensor:
    return torch.relu(m.fc(x)) + 1.0 if x.sum() > 0 else x.sin() * m.gate.bias


def _scan(m: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def step(state: dict[str, Tensor], row: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        h = torch.tanh(m.fc(row) + m.gate(state["h"]))
        n = state["n"] + 1
        return {"h": h, "n": n}, [h * row, n * m.scale]

    init = {"h": torch.zeros(WIDTH), "n": torch.zeros((), dtype=torch.int64)}
    last, (products, counts) = scan(step, init, x, reverse=True)
    return last["h"], products, counts


def _plain_scan(m: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, products, counts = torch.zeros(WIDTH), [], []
    for number, row in enumerate(x.flip(0), 1):
        h = torch.tanh(m.fc(row) + m.gate(h))
        products.append(h * row)
        counts.append(number * m.scale)
    return h, torch.stack(products).flip(0), torch.stack(counts).flip(0)


def _floats(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(m.fc(row) + m.gate(h)) * torch.tensor([1.0, 2.0, 4.0])
        return h, h * row

    return scan(step, x.sum(0), x)


def _plain_floats(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    h, products = x.sum(0), []
    for row in x:
        h = torch.tanh(m.fc(row) + m.gate(h)) * torch.tensor([1.0, 2.0, 4.0])
        products.append(h * row)
    return h, torch.stack(products)


def _map(m: Net, x: Tensor) -> Tensor:
    return map_rows(lambda row, w: torch.sigmoid(m.fc(row)) * w.sum(), x, m.gate.weight)


def _plain_map(m: Net, x: Tensor) -> Tensor:
    return torch.stack([torch.sigmoid(m.fc(row)) * m.gate.weight.sum() for row in x])


def _while(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.while_loop(
        lambda n, y: y.abs().sum() < 10 * n.new_ones(()) * 4,
        lambda n, y: (n + 1, y * 1.5 + m.scale),
        (torch.zeros((), dtype=torch.int64), x),
    )


def _plain_while(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    n, y = 0, x
    while y.abs().sum() < 40:
        n, y = n + 1, y * 1.5 + m.scale
    return torch.tensor(n), y


def _nested(m: Net, x: Tensor) -> Tensor:
    def outer(c: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        def inner(a: Tensor) -> Tensor:
            return torch.cond(
                a.sum() > 0, lambda q: torch.tanh(m.fc(q)), lambda q: q * m.scale + 1, (a,)
            )

        (c,) = ipu_dynamo.for_loop(3, inner, [c])
        return c, c * row

    c, rows = scan(outer, x[0], x)
    return c * rows


def _plain_nested(m: Net, x: Tensor) -> Tensor:
    c, rows = x[0], []
    for row in x:
        for _ in range(3):
            c = torch.tanh(m.fc(c)) if c.sum() > 0 else c * m.scale + 1
        rows.append(c * row)
    return c * torch.stack(rows)


FORMS = {
    "for_loop": (_for, _plain_for),
    "cond": (_cond, _plain_cond),
    "torch.cond": (_torch_cond, _plain_torch_cond),
    "scan": (_scan, _plain_scan),
    "scan of floats": (_floats, _plain_floats),
    "map": (_map, _plain_map),
    "while_loop": (_while, _plain_while),
    "nested": (_nested, _plain_nested),
}
TRAINED = [name for name in FORMS if name != "while_loop"]


def net(*forms: str) -> Net:
    """A model of some of the `FORMS`, which returns the results of all."""

    def computed(way: int) -> Callable[[Net, Tensor], list[Tensor]]:
        def run(model: Net, x: Tensor) -> list[Tensor]:
            results = [FORMS[form][way](model, x) for form in forms]
            return [value for made in results for value in (made if _several(made) else [made])]

        return run

    return Net(computed(0), computed(1))


def _several(made: object) -> bool:
    return not isinstance(made, Tensor)


class Loss(nn.Module):
    """The mean square of what a model returns, as a loss."""

    def __init__(self, model: Net, *, plain: bool = False) -> None:
        super().__init__()
        self.model, self.plain = model, plain

    def forward(self, x: Tensor) -> Tensor:
        values = self.model.plain(x) if self.plain else self.model(x)
        return ipu_dynamo.identity_loss(sum(v.square().mean() for v in values), "none")


def inputs(count: int = 3) -> list[Tensor]:
    """Some of a positive sum, some of a negative one."""
    rng = torch.Generator().manual_seed(1)
    drawn = [torch.randn(ROWS, WIDTH, generator=rng) for _ in range(count)]
    return [sign * x.abs() if sign else x for sign, x in zip((0, 1, -1), drawn, strict=False)]
