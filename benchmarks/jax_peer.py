"""Run the work of a case in JAX as one function, compiled by XLA, and check its values first.

The models are PyTorch's, read module by module, with their weights. Training scans over the steps
of a call, and over the micro-batches of each step; weights and states are donated. Values are
compared with plain PyTorch's after the first call: XLA is known to compute wrong sums in some
fusions. JAX is an extra of the benchmarks (`pip install '.[bench]'`); without it JAX
takes no part.
"""

import copy
import importlib.util
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Checked, Maker, WrongValuesError
from benchmarks.models import Apply, Layer, Places, Repeated, WithLoss, cross_entropy
from benchmarks.work import Training, train

JAX = "JAX"  # the name of the contender
TOLERANCE = 1e-4  # of the largest value
Arrays = dict[str, Any]


def with_installed(contenders: Mapping[str, Maker]) -> Mapping[str, Maker]:
    """`contenders`, without JAX where it is not installed."""
    return {name: maker for name, maker in contenders.items() if name != JAX or is_installed()}


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
    jnp, value_and_grad = jax().numpy, jax().value_and_grad(InJax(work.model))
    parts = work.micro_batches()
    stacked = [
        _array(torch.stack(tensors)).reshape(work.steps(), work.accumulation, *tensors[0].shape)
        for tensors in zip(*parts, strict=True)
    ]
    plain = copy.deepcopy(work.model)
    optimizer = work.optimizer(plain)
    update, state = _rule(optimizer.param_groups[0])
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

    def expected() -> Tensor:
        """The losses of the first two calls of plain PyTorch."""
        twice = (train(work, plain, optimizer, optimizer.step) for _ in range(2))
        return torch.stack(list(itertools.chain.from_iterable(twice)))

    def check() -> None:
        run()  # the weights after the first call count, too
        compare(numpy.concatenate([numpy.ravel(loss) for loss in losses]), expected())

    return Checked(run, check)


def inferred(model: nn.Module, x: Tensor) -> Checked:
    """Compute an inference in JAX, which is compared with the model's result."""
    weights, given = arrays(model), _array(x)
    compiled = jax().jit(InJax(model))

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


class InJax:
    """A model as a function of JAX: of parameters by name, and of the model's inputs.

    A parameter that several modules share has one name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {parameter: name for name, parameter in model.named_parameters()}

    def __call__(self, p: Arrays, x: Any, *targets: Any) -> Any:
        return self._run(self._model, p, x, *targets)

    def _run(self, module: nn.Module, p: Arrays, x: Any, *targets: Any) -> Any:
        nn_, jnp, lax = jax().nn, jax().numpy, jax().lax
        match module:
            case WithLoss():
                return _LOSSES[module.loss](self._run(module.layers, p, x), *targets)
            case nn.Sequential():
                for layer in module:
                    x = self._run(layer, p, x)
                return x
            case nn.Linear():
                product = x @ self._of(p, module.weight).T
                return product if module.bias is None else product + self._of(p, module.bias)
            case nn.Embedding():
                return self._of(p, module.weight)[x]
            case Places():
                return x + self._of(p, module.weight)
            case nn.LayerNorm():
                centred = x - x.mean(-1, keepdims=True)
                scale = lax.rsqrt((centred**2).mean(-1, keepdims=True) + module.eps)
                return centred * scale * self._of(p, module.weight) + self._of(p, module.bias)
            case nn.Conv2d():
                padding = [(size, size) for size in module.padding]
                result = lax.conv_general_dilated(x, self._of(p, module.weight), (1, 1), padding)
                return result + self._of(p, module.bias)[:, None, None]
            case nn.MaxPool2d():
                return lax.reduce_window(x, -jnp.inf, lax.max, *_WINDOWS)
            case nn.ReLU():
                return nn_.relu(x)
            case nn.Flatten():
                return x.reshape(len(x), -1)
            case Apply():
                return module.function(x)
            case Layer():
                return self._layer(module, p, x)
            case nn.LSTM():
                return self._lstm(module, p, x)
            case Repeated():
                step = self._run
                return lax.fori_loop(
                    0, module.count, lambda _, h: jnp.tanh(step(module.layer, p, h)), x
                )
        raise ValueError(f"{type(module).__name__} is not written in JAX")

    def _of(self, p: Arrays, parameter: nn.Parameter) -> Any:
        return p[self._names[parameter]]

    def _layer(self, layer: Layer, p: Arrays, x: Any) -> Any:
        """A pre-norm transformer layer on `[batch, length, width]`."""
        batch, length, width = x.shape
        attend = self._run(layer.attend, p, self._run(layer.norm1, p, x))
        parts = jax().numpy.moveaxis(attend.reshape(batch, length, 3, layer.heads, -1), 2, 0)
        mixed = jax().nn.dot_product_attention(*parts, is_causal=layer.causal)
        x = x + self._run(layer.project, p, mixed.reshape(batch, length, width))
        h = self._run(layer.up, p, self._run(layer.norm2, p, x))
        return x + self._run(layer.down, p, jax().nn.gelu(h, approximate=False))

    def _lstm(self, lstm: nn.LSTM, p: Arrays, x: Any) -> tuple[Any, None]:
        """The outputs `[length, batch, width]`; one product for all inputs of a layer."""
        jnp, sigmoid = jax().numpy, jax().nn.sigmoid
        for weights in lstm.all_weights:
            w_in, w_hidden, b_in, b_hidden = (self._of(p, weight) for weight in weights)

            def cell(state: Any, gates: Any, w_hidden: Any = w_hidden) -> Any:
                h, c = state
                i, f, g, o = jnp.split(gates + h @ w_hidden.T, 4, axis=1)
                c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
                h = sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            zeros = jnp.zeros((x.shape[1], w_hidden.shape[1]))
            x = jax().lax.scan(cell, (zeros, zeros), x @ w_in.T + (b_in + b_hidden))[1]
        return x, None


_WINDOWS = (1, 1, 2, 2), (1, 1, 2, 2), "VALID"  # of pools: size and strides of two, no padding


def _cross_entropy(logits: Any, classes: Any) -> Any:
    jnp = jax().numpy
    logits, classes = logits.reshape(-1, logits.shape[-1]), classes.reshape(-1, 1)
    return -jnp.take_along_axis(jax().nn.log_softmax(logits), classes, axis=1).mean()


_LOSSES = {cross_entropy: _cross_entropy, F.mse_loss: lambda x, y: ((x - y) ** 2).mean()}
