"""Run the work of a case in JAX as one compiled function, and check what it computes first.

Training scans over the steps of a call, and over the micro-batches of each step; weights and states
are donated. Values are compared with plain PyTorch's after the first call: XLA is known to compute
wrong sums in some fusions.
"""

import copy
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from benchmarks.measure import Checked, Maker, WrongValuesError

NAME = "JAX"
TOLERANCE = 1e-4  # of the largest value
Arrays = dict[str, Any]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Training:
    """What is trained, by whom, on what.

    Args:
        model: takes a micro-batch, returns its loss.
        optimizer: SGD or AdamW, of a model.
        loss: the same loss in JAX, from parameters by name and a micro-batch.
        inputs: the rows of a call.
        rows: rows of a micro-batch, along dimension `axis`.
        accumulation: micro-batches of a step.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    rows: int
    accumulation: int = 1
    axis: int = 0

    @property
    def micro_batches(self) -> list[tuple[Tensor, ...]]:
        """The parts of a call, in order."""
        return list(zip(*(t.split(self.rows, self.axis) for t in self.inputs), strict=True))


def with_jax(contenders: Mapping[str, Maker], maker: Maker) -> dict[str, Maker]:
    """`contenders` with JAX in front of the last one, which is ours, where JAX is installed."""
    if not is_installed():
        return dict(contenders)
    *others, last = contenders
    return {**{name: contenders[name] for name in others}, NAME: maker, last: contenders[last]}


def is_installed() -> bool:
    """Whether there can be a JAX contender."""
    return importlib.util.find_spec("jax") is not None


def jax() -> Any:
    """The package, with as many threads as PyTorch has; it reads them when it is imported."""
    threads = torch.get_num_threads()
    os.environ["NPROC"] = str(threads)
    if threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    import jax

    jax.config.update("jax_platforms", "cpu")
    return jax


def trained(work: Training) -> Checked:
    """Train in calls of JAX; losses of two calls are compared with plain PyTorch's."""
    lax, tree = jax().lax, jax().tree
    jnp, value_and_grad = jax().numpy, jax().value_and_grad(work.loss)
    parts = work.micro_batches
    steps = len(parts) // work.accumulation
    stacked = [
        _array(torch.stack(tensors)).reshape(steps, work.accumulation, *tensors[0].shape)
        for tensors in zip(*parts, strict=True)
    ]
    update, state = _rule(work.optimizer(copy.deepcopy(work.model)).param_groups[0])
    weights = arrays(work.model)

    def micro_batch(carry: Any, batch: Any) -> Any:
        weights, total = carry
        loss, gradients = value_and_grad(weights, *batch)
        return (weights, tree.map(jnp.add, total, gradients)), loss

    def step(carry: Any, batch: Any) -> Any:
        weights, state = carry
        zeros = tree.map(jnp.zeros_like, weights)
        (_, total), losses = lax.scan(micro_batch, (weights, zeros), batch)
        gradients = tree.map(lambda g: g / work.accumulation, total)
        return update(weights, gradients, state), losses

    def call(weights: Any, state: Any, batches: Any) -> Any:
        (weights, state), losses = lax.scan(step, (weights, state), batches)
        return weights, state, losses

    compiled = jax().jit(call, donate_argnums=(0, 1))
    current, losses = [weights, state(weights)], []

    def run() -> Any:
        *current[:], loss = compiled(*current, stacked)
        losses[:] = [*losses[-1:], loss.block_until_ready()]
        return loss

    def check() -> None:
        run()  # what the first call made of the weights counts, too
        compare(numpy.concatenate([numpy.ravel(loss) for loss in losses]), _losses(work, 2))

    return Checked(run, check)


def inferred(function: Callable[..., Any], model: nn.Module, x: Tensor) -> Checked:
    """Compute `function(parameters, x)` in JAX, which is compared with the model's result."""
    weights, given = arrays(model), _array(x)
    compiled = jax().jit(function)

    def run() -> Any:
        return compiled(weights, given).block_until_ready()

    def check() -> None:
        with torch.no_grad():
            compare(run(), model(x))

    return Checked(run, check)


def arrays(model: nn.Module) -> Arrays:
    """The parameters by name."""
    return {name: _array(value) for name, value in model.named_parameters()}


def compare(values: Any, expected: Tensor) -> None:
    """Raise where values differ by more than the tolerance."""
    theirs = torch.from_numpy(numpy.array(values)).double().flatten()
    ours = expected.detach().double().flatten()
    apart = float((theirs - ours).abs().max() / ours.abs().max())
    if not apart <= TOLERANCE:
        raise WrongValuesError(apart)


def _array(tensor: Tensor) -> Any:
    return jax().numpy.array(tensor.detach().numpy())


def _losses(work: Training, calls: int) -> Tensor:
    """The losses of so many calls of plain PyTorch."""
    model = copy.deepcopy(work.model)
    optimizer, losses = work.optimizer(model), []
    for number, batch in enumerate(work.micro_batches * calls):
        if number % work.accumulation == 0:
            optimizer.zero_grad()
        loss = model(*batch)
        (loss / work.accumulation).backward()
        losses.append(loss.detach())
        if number % work.accumulation == work.accumulation - 1:
            optimizer.step()
    return torch.stack(losses)


def _rule(group: dict[str, Any]) -> tuple[Callable[..., Any], Callable[[Arrays], Any]]:
    """How weights are updated by gradients, and the states from which that begins."""
    jnp, tree = jax().numpy, jax().tree
    rate = group["lr"]
    if "momentum" in group:
        momentum = group["momentum"]

        def sgd(weights: Arrays, gradients: Arrays, state: Arrays) -> Any:
            if momentum:
                gradients = state = tree.map(lambda b, g: momentum * b + g, state, gradients)
            return tree.map(lambda w, g: w - rate * g, weights, gradients), state

        return sgd, lambda weights: tree.map(jnp.zeros_like, weights) if momentum else {}

    (beta1, beta2), decay, eps = group["betas"], group["weight_decay"], group["eps"]

    def adamw(weights: Arrays, gradients: Arrays, state: Any) -> Any:
        count, first, second = state
        count = count + 1
        first = tree.map(lambda m, g: m + (1 - beta1) * (g - m), first, gradients)
        second = tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, second, gradients)
        size, root = rate / (1 - beta1**count), jnp.sqrt(1 - beta2**count)

        def moved(w: Any, m: Any, v: Any) -> Any:
            return w * (1 - rate * decay) - size * m / (jnp.sqrt(v) / root + eps)

        return tree.map(moved, weights, first, second), (count, first, second)

    def begin(weights: Arrays) -> Any:
        return jnp.zeros(()), *(tree.map(jnp.zeros_like, weights) for _ in range(2))

    return adamw, begin
