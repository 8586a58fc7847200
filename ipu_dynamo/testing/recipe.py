"""Build models and data from a short description, which a failing test prints and can be kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ipu_dynamo.ops.marks.markers import identity_loss
from ipu_dynamo.testing.kinds import BUFFERED, KINDS, TIED

Sharing = Literal["own", "tied", "module"]
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum": lambda value, target, ids: identity_loss(value, "sum"),
    "none": lambda value, target, ids: identity_loss(value * 2, "none"),
    "squares": lambda value, target, ids: F.mse_loss(value, target, reduction="sum"),
    "mse": lambda value, target, ids: F.mse_loss(value, target),
    "mean": lambda value, target, ids: identity_loss(value, "mean"),
    "cross_entropy": lambda value, target, ids: F.cross_entropy(value, ids),
}
EXACT_LOSSES = ("sum", "none", "squares")
RETURNS: dict[str, Callable[["Drawn", list[Tensor]], Any]] = {
    "last": lambda model, values: values[-1],
    "middle": lambda model, values: values[len(values) // 2],
    "input": lambda model, values: values[0],
    "view": lambda model, values: values[-1].t().reshape(-1),
    "scalar": lambda model, values: values[-1].sum(),
    "weight": lambda model, values: model.head.weight,
    "expanded": lambda model, values: values[-1][:1].expand_as(values[-1]),
    "buffer": lambda model, values: next(model.buffers(), values[-1]),
    "constant": lambda model, values: torch.ones(2),
    "nothing": lambda model, values: None,
    "number": lambda model, values: 7,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of a model.

    Args:
        kind: a key of `KINDS`.
        x: the first value that it reads: 0 is the last value before it, 1 the one before that; the
            first value if there are fewer.
        y: the second value that it reads, counted in the same way.
        shares: its weights: `own`, those of the nearest earlier layer of its kind (`module`), or
            only its matrix from the nearest earlier layer with one of that shape (`tied`).
    """

    kind: str
    x: int = 0
    y: int = 0
    shares: Sharing = "own"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, its weights, and its data. Equal recipes build equal models.

    The model is called with `(x, extra)` and returns `{"loss": ..., "rest": (...)}`. After its
    steps a linear layer, the head, makes sure that the loss depends on a weight.

    Args:
        steps: its layers.
        width: features of every value, at least 1.
        rows: rows of a micro-batch, at least 2.
        inputs: floating-point inputs, at least 1; indices and a target come on top.
        losses: keys of `LOSSES`; several are added up and marked as one.
        returns: keys of `RETURNS`.
        dtype: of inputs and weights.
        exact: all numbers are small integers, so that every sum is exact in one step of training.
        evaluate: put the model into eval mode.
        strided: the first input's rows are not contiguous.
        seed: of weights and data.
    """

    steps: tuple[Step, ...] = ()
    width: int = 2
    rows: int = 2
    inputs: int = 1
    losses: tuple[str, ...] = ("sum",)
    returns: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    exact: bool = False
    evaluate: bool = False
    strided: bool = False
    seed: int = 0

    def build(self) -> "Drawn":
        """The model."""
        return Drawn(self)

    def data(self, micro_batches: int, seed: int = 0) -> tuple[Tensor, dict[str, Any]]:
        """The arguments of one call with that many micro-batches.

        Args:
            micro_batches: how many the tensors have.
            seed: of other data for the same model.
        """
        rows = self.rows * micro_batches
        generator = torch.Generator().manual_seed(1000 * self.seed + seed + 1)
        tensors = [
            _numbers((rows, self.width), self, generator, bound=2) for _ in range(self.inputs + 1)
        ]
        ids = torch.randint(0, self.width, (rows,), generator=generator)
        x, target, *more = tensors
        if self.strided:
            x = x.repeat_interleave(2, 1)[:, ::2]
        return x, {"more": more, "ids": ids, "target": target}

    @property
    def shares_buffers(self) -> bool:
        """Whether two layers change one buffer: a pipeline refuses that in two stages."""
        kinds = [step.kind for step in self.steps]
        return any(
            step.shares == "module" and step.kind in BUFFERED and step.kind in kinds[:index]
            for index, step in enumerate(self.steps)
        )

    def runs(self, *, training: bool = True) -> bool:
        """Whether plain PyTorch runs one micro-batch.

        It refuses a gradient through a value that a later layer has changed in place.

        Args:
            training: with gradients.
        """
        model, data = self.build(), self.data(1)
        try:
            with torch.set_grad_enabled(training):
                loss = model(*data)["loss"].sum()
            if training:
                loss.backward()
        except RuntimeError as error:
            if "in-place" not in str(error) and "inplace" not in str(error):
                raise
            return False
        return True


class Drawn(nn.Module):
    """The model of a recipe; its layers are `layers.0`, `layers.1`, ... and `head`."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        layers: list[Layer] = []
        for step in recipe.steps:
            layers.append(Layer(step, recipe.width, layers))
        self.layers = nn.ModuleList(layers)
        self.head: nn.Module = nn.Linear(recipe.width, recipe.width)
        self.to(recipe.dtype)
        generator = torch.Generator().manual_seed(recipe.seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(_numbers(tuple(parameter.shape), recipe, generator, bound=1))
        if recipe.evaluate:
            self.eval()

    @property
    def names(self) -> list[str]:
        """The layers in the order in which they run."""
        return [*(f"layers.{i}" for i in range(len(self.layers))), "head"]

    def forward(self, x: Tensor, extra: dict[str, Any]) -> dict[str, Any]:
        recipe, ids, values = self.recipe, extra["ids"], [x, *extra["more"]]
        for step, layer in zip(recipe.steps, self.layers, strict=True):
            value = layer(_back(values, step.x), _back(values, step.y), ids)
            values.append(value.clamp(-2, 2) if recipe.exact else value)
        values.append(self.head(values[-1]))
        losses = [
            LOSSES[name](_back(values, back), extra["target"], ids)
            for back, name in enumerate(recipe.losses)
        ]
        loss = losses[0]
        if len(losses) > 1:
            loss = identity_loss(sum(one.sum() for one in losses), "sum")  # type: ignore[arg-type]
        return {"loss": loss, "rest": tuple(RETURNS[name](self, values) for name in recipe.returns)}


class Layer(nn.Module):
    """One step of a recipe. Its module `inner`, which layers may share, has the weights."""

    def __init__(self, step: Step, width: int, earlier: "list[Layer]") -> None:
        super().__init__()
        self.step = step
        kind = KINDS[step.kind]
        self.run = kind.run
        self.inner = kind.make(width) if kind.make else None
        if step.shares == "module":
            same = [layer for layer in earlier if layer.step.kind == step.kind]
            self.inner = same[-1].inner if same else self.inner
        tied = [layer.inner for layer in earlier if layer.step.kind in TIED]
        if step.shares == "tied" and step.kind in TIED and tied:
            weight = cast(nn.Module, tied[-1]).weight
            cast(nn.Module, self.inner).weight = weight

    def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        return self.run(self.inner, x, y, ids)

    def extra_repr(self) -> str:
        return str(self.step)


def _back(values: list[Tensor], back: int) -> Tensor:
    return values[-1 - min(back, len(values) - 1)]


def _numbers(
    shape: tuple[int, ...], recipe: Recipe, generator: torch.Generator, *, bound: int
) -> Tensor:
    """Numbers between -bound and bound: integers for an exact recipe."""
    if recipe.exact:
        return torch.randint(-bound, bound + 1, shape, generator=generator).to(recipe.dtype)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 * bound - bound).to(
        recipe.dtype
    )
