"""Draw models of loops and branches, each of which also computes its values in plain Python."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.map import map as map_rows

import ipu_dynamo
from ipu_dynamo import Block

WIDTH, ROWS = 3, 4
FORMS = ("for_loop", "cond", "torch.cond", "while_loop", "scan", "map")
TRAINED = tuple(form for form in FORMS if form != "while_loop")
BY_VALUE = ("for_loop", "cond")  # whose bodies may change what they get
OF_ROWS = ("scan", "map")  # whose bodies get rows
ANY_RANK = {
    "linear": lambda m, a, b, x: m.fc(a).tanh(),
    "gate": lambda m, a, b, x: torch.sigmoid(m.gate(a)) * b,
    "scale": lambda m, a, b, x: a * m.scale,
    "product": lambda m, a, b, x: a.tanh() * b,
    "sum": lambda m, a, b, x: a.sin() - 0.5 * b,
    "outside": lambda m, a, b, x: a * x.mean() + m.gate.bias,
    "constant": lambda m, a, b, x: a + torch.tensor([0.5, -0.5, 1.0]),
    "chosen": lambda m, a, b, x: torch.where(a > b, a, -b),
}
RANK_2 = {
    "vmap": lambda m, a, b, x: torch.vmap(lambda row, v: m.fc(row) * v.sigmoid())(a, b),
    "recurrent": lambda m, a, b, x: m.lstm(a)[0] + b,
}
OPERATORS = ANY_RANK | RANK_2


@dataclass(frozen=True)
class Step:
    """An operator, or a loop or branch, on earlier values `a` and `b`."""

    what: "str | Form"
    a: int
    b: int


@dataclass(frozen=True)
class Form:
    """A loop or branch.

    Args:
        bodies: what it calls; a branch has two.
        count: iterations, at most; of loops over rows there are as many as rows.
        flag: whether a body changes its input in place, or a scan goes backward.
    """

    kind: str
    bodies: tuple[tuple[Step, ...], ...]
    count: int
    flag: bool


def every(kinds: tuple[str, ...]) -> list[Form]:
    """Forms of all kinds, with all operators in their bodies, and one in another's."""
    inside = Form(kinds[0], ((Step("scale", 0, 1), Step("outside", 1, 2)),), 2, False)
    dealt: list[str | Form] = [*OPERATORS, inside]
    called = [kind for kind in kinds for _ in range(2 if kind in ("cond", "torch.cond") else 1)]
    whole = [kind for kind in called if kind not in OF_ROWS]
    bodies: dict[str, list[tuple[Step, ...]]] = {kind: [] for kind in kinds}
    for number, kind in enumerate(whole):
        bodies[kind].append(tuple(Step(what, -1, -2) for what in dealt[number :: len(whole)]))
    for kind in OF_ROWS:
        bodies[kind].append((Step("gate", -1, -2), Step("outside", -1, -2)))
    return [
        Form(kind, tuple(of), 2, number % 2 == 0)
        for number, (kind, of) in enumerate(bodies.items())
    ]


@st.composite
def forms(draw, *, kinds: tuple[str, ...], rank: int = 2, depth: int = 2) -> Form:
    """A form whose bodies hold at most `depth - 1` more levels of them."""
    kind = draw(st.sampled_from([k for k in kinds if rank == 2 or k not in OF_ROWS]))
    inner = 1 if kind in OF_ROWS else rank
    bodies = [
        draw(bodies_of(kinds=kinds, rank=inner, depth=depth))
        for _ in range(2 if kind in ("cond", "torch.cond") else 1)
    ]
    return Form(kind, tuple(bodies), draw(st.integers(0, 3)), draw(st.booleans()))


@st.composite
def bodies_of(draw, *, kinds: tuple[str, ...], rank: int, depth: int) -> tuple[Step, ...]:
    operators = st.sampled_from([*ANY_RANK, *(RANK_2 if rank == 2 else ())])
    steps = []
    for number in range(draw(st.integers(1, 3))):
        earlier = st.integers(0, number + 1)  # two values are there at the beginning
        nested = depth > 1 and draw(st.integers(0, 2)) == 0
        inside = forms(kinds=kinds, rank=rank, depth=depth - 1)
        what = draw(inside if nested else operators)
        steps.append(Step(what, draw(earlier), draw(earlier)))
    return tuple(steps)


def run(steps: tuple[Step, ...], model: nn.Module, values: list[Tensor], outside: Tensor) -> Tensor:
    """The last value of a body, which gets two."""
    for step in steps:
        a, b = values[step.a], values[step.b]
        if isinstance(step.what, Form):
            way = plain if model.plain else looped
            values = [*values, way(step.what, model, a, b, outside)]
        else:
            values = [*values, OPERATORS[step.what](model, a, b, outside)]
    return values[-1]


def looped(form: Form, model: nn.Module, a: Tensor, b: Tensor, outside: Tensor) -> Tensor:
    """What a form computes, as an operator."""
    first, *others = _functions(form, model, outside)
    match form.kind:
        case "for_loop":
            return ipu_dynamo.for_loop(form.count, lambda a, b: (b * 0.5, first(a, b)), [a, b])[1]
        case "cond":
            return ipu_dynamo.cond(a.sum() > 0, first, [a, b], others[0], [a, b])[0]
        case "torch.cond":
            return torch.cond(a.sum() > 0, first, others[0], (a, b))
        case "while_loop":
            return torch.while_loop(
                lambda n, a, b: (n < form.count) & (a.sum() < 2),
                lambda n, a, b: (n + 1, first(a, b), b * 0.5),
                (torch.zeros((), dtype=torch.int64), a, b),
            )[1]
        case "scan":

            def step(carry: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                new = first(carry, rows[0]) + rows[1]
                return new * 0.5, new

            last, rows = scan(step, a.sum(0), (a, b), reverse=form.flag)
            return last + rows
        case _:
            return map_rows(lambda row, b: first(row, b[0]), a, b)


def plain(form: Form, model: nn.Module, a: Tensor, b: Tensor, outside: Tensor) -> Tensor:
    """The same in Python."""
    first, *others = _functions(form, model, outside)
    match form.kind:
        case "for_loop":
            for _ in range(form.count):
                a, b = b * 0.5, first(a.clone(), b.clone())
            return b
        case "cond" | "torch.cond":
            return (first if a.sum() > 0 else others[0])(a.clone(), b.clone())
        case "while_loop":
            n = 0
            while n < form.count and a.sum() < 2:
                n, a, b = n + 1, first(a, b), b * 0.5
            return a
        case "scan":
            carry, rows = a.sum(0), []
            for row, other in list(zip(a, b, strict=True))[:: -1 if form.flag else 1]:
                new = first(carry, row) + other
                rows.append(new)
                carry = new * 0.5
            return carry + torch.stack(rows[:: -1 if form.flag else 1])
        case _:
            return torch.stack([first(row, b[0]) for row in a])


def _functions(
    form: Form, model: nn.Module, outside: Tensor
) -> list[Callable[[Tensor, Tensor], Tensor]]:
    writes = form.flag and form.kind in BY_VALUE

    def function(steps: tuple[Step, ...]) -> Callable[[Tensor, Tensor], Tensor]:
        def body(a: Tensor, b: Tensor) -> Tensor:
            return run(steps, model, [a.mul_(0.5) if writes else a, b], outside)

        return body

    return [function(steps) for steps in form.bodies]


class Drawn(nn.Module):
    """A layer on the first IPU, forms on the second, or all on one; a loss, or values.

    Args:
        stages: 1 or 2.
        plain: whether forms are plain Python.
    """

    def __init__(self, drawn: list[Form], *, stages: int = 1, trained: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.fc, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 1.5]))
        self.drawn, self.stages, self.trained, self.plain = drawn, stages, trained, False

    def forward(self, x: Tensor) -> Tensor:
        with Block("a", 0):
            h = self.before(x)
        with Block("b", self.stages - 1):
            y = run(tuple(Step(form, -1, -2) for form in self.drawn), self, [x, h], x) + h
            if not self.trained:
                return y
            return ipu_dynamo.identity_loss((y - 1).square().mean(), "none")
