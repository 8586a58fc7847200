"""Draw the random numbers of `keras.random` by the states of seed generators, while tracing.

A draw is a function of its generator's state, the replica and the element. The state is a variable
of the step, which each draw advances. An int as seed gives a constant, drawn by Keras itself.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import torch
from keras import ops, tree
from torch import Tensor

from ipu_dynamo.capture.private.tracing import outside_function_modes, outside_modes
from ipu_dynamo.errors import CompileError
from ipu_dynamo.keras.private.stateless_names import backend_core, backend_random, draw_seed
from ipu_dynamo.keras.step.gamma_draws import UNIFORMS, gamma_numbers
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.library.keyed_random import (
    keyed_bernoulli,
    keyed_normal,
    keyed_uniform,
)
from ipu_dynamo.ops.private.replacing import in_this_thread, replaced

GeneratorOfModel = Callable[[], Any]  # for draws without a seed
_UNKNOWN = ("binomial",)


@contextmanager
def draws_keyed(own_generator: GeneratorOfModel) -> Iterator[None]:
    """Let this thread's random functions of Keras draw by the states of their seed generators.

    Args:
        own_generator: gives the seed generator of draws that name none.
    """
    draws = _Draws(own_generator)
    with ExitStack() as stack:
        for name in (*draws.known, *_UNKNOWN):
            original = getattr(backend_random, name)
            replacement = in_this_thread(draws.replacing(name, original), original)
            stack.enter_context(replaced(backend_random, name, replacement))
        yield


class _Draws:
    """The replacements of Keras' random functions."""

    def __init__(self, own_generator: GeneratorOfModel) -> None:
        self._own_generator = own_generator
        self.known: dict[str, Callable[..., Any]] = {
            "normal": self.normal,
            "uniform": self.uniform,
            "randint": self.randint,
            "truncated_normal": self.truncated_normal,
            "categorical": self.categorical,
            "dropout": self.dropout,
            "shuffle": self.shuffle,
            "gamma": self.gamma,
            "beta": self.beta,
        }

    def replacing(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Make the replacement of the random function `name` for tracing."""

        def drawn(*args: Any, seed: Any = None, **kwargs: Any) -> Any:
            if str(backend_core.get_device()) == "meta":
                return original(*args, seed=seed, **kwargs)
            if isinstance(seed, int):
                return _constant(original, args, {**kwargs, "seed": seed})
            if name in _UNKNOWN:
                raise CompileError(
                    f"keras.random.{name} draws as often as its own numbers say, which no program "
                    "can",
                    hint="draw it outside of the model, and pass it as an input",
                )
            return self.known[name](*args, seed=seed, **kwargs)

        return drawn

    def key(self, seed: Any) -> Tensor:
        """The present state of a generator, which advances."""
        generator = self._own_generator() if seed is None else seed
        key: Tensor = draw_seed(generator)
        return key

    def normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> Any:
        drawn = keyed_normal(self.key(seed), tuple(shape))
        return (drawn * _number(stddev) + _number(mean)).to(_dtype(dtype))

    def uniform(
        self, shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> Any:
        low, high, type_ = _number(minval), _number(maxval), _dtype(dtype)
        if not isinstance(low, Tensor) and not isinstance(high, Tensor):
            return keyed_uniform(self.key(seed), tuple(shape), low, high, dtype=type_)
        drawn = keyed_uniform(self.key(seed), tuple(shape))
        return (drawn * (high - low) + low).to(type_)

    def randint(
        self, shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None
    ) -> Any:
        low, high = _number(minval), _number(maxval)
        drawn = keyed_uniform(self.key(seed), tuple(shape))
        return ((drawn * (high - low)).floor() + low).to(_dtype(dtype))

    def truncated_normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> Any:
        """The normal numbers within two deviations, by the inverse of the normal distribution."""
        edge = 0.5 * (1.0 + math.erf(-(2.0**0.5)))
        drawn = keyed_uniform(self.key(seed), tuple(shape), edge, 1.0 - edge)
        normal = torch.special.ndtri(drawn).clamp(-2.0, 2.0)
        return (normal * _number(stddev) + _number(mean)).to(_dtype(dtype))

    def categorical(
        self, logits: Any, num_samples: int, dtype: Any = "int32", seed: Any = None
    ) -> Any:
        """The place of the largest logit with noise of Gumbel's distribution, for each sample."""
        scores = ops.convert_to_tensor(logits)
        rows, classes = scores.shape
        drawn = keyed_uniform(self.key(seed), (rows, num_samples, classes))
        noise = -torch.log(-torch.log(drawn.clamp(min=2.0**-25)))
        return (scores.unsqueeze(1) + noise).argmax(-1).to(_dtype(dtype))

    def dropout(
        self, inputs: Tensor, rate: float, noise_shape: Any = None, seed: Any = None
    ) -> Any:
        if rate == 1.0:
            return torch.zeros_like(inputs)
        if rate == 0.0:
            return inputs
        shape: Sequence[int] = inputs.shape
        if noise_shape is not None:
            shape = [s if n is None else n for s, n in zip(inputs.shape, noise_shape, strict=True)]
        mask = keyed_bernoulli(self.key(seed), 1.0 - rate, shape)
        kept = torch.broadcast_to(mask, inputs.shape)
        return torch.where(kept, inputs / (1.0 - rate), torch.zeros_like(inputs))

    def gamma(self, shape: Any, alpha: Any, dtype: Any = None, seed: Any = None) -> Any:
        drawn = keyed_uniform(self.key(seed), (UNIFORMS, *shape))
        return gamma_numbers(drawn, _shape_of(alpha, shape)).to(_dtype(dtype))

    def beta(self, shape: Any, alpha: Any, beta: Any, dtype: Any = None, seed: Any = None) -> Any:
        """The share of one of two numbers of gamma distributions."""
        drawn = keyed_uniform(self.key(seed), (2 * UNIFORMS, *shape))
        one = gamma_numbers(drawn[:UNIFORMS], _shape_of(alpha, shape))
        other = gamma_numbers(drawn[UNIFORMS:], _shape_of(beta, shape))
        return (one / (one + other)).to(_dtype(dtype))

    def shuffle(self, x: Any, axis: int = 0, seed: Any = None) -> Any:
        tensor = ops.convert_to_tensor(x)
        axis %= tensor.dim()
        order = keyed_uniform(self.key(seed), tensor.shape[: axis + 1]).argsort(axis)
        order = order.reshape(*order.shape, *[1] * (tensor.dim() - axis - 1))
        return tensor.gather(axis, order.expand(tensor.shape))


def _constant(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Draw for a seed that is a number, as Keras does: the same values at each call."""
    tensors = [leaf for leaf in tree.flatten((list(args), kwargs)) if isinstance(leaf, Tensor)]
    if not tensors:
        with outside_modes(), outside_function_modes(), torch.no_grad():
            drawn = original(*args, **kwargs)
        # a copy, which says that this tensor is meant to be a constant
        return aten.lift_fresh_copy(drawn)
    raise CompileError(
        "a random function of keras.random has a number as seed, and depends on a tensor",
        hint="give it a keras.random.SeedGenerator",
    )


def _number(value: Any) -> Any:
    """A bound: a Python number, or a tensor."""
    return value if isinstance(value, bool | int | float) else ops.convert_to_tensor(value)


def _shape_of(value: Any, shape: Any) -> Tensor:
    """The shape parameter of a distribution for each number; no gradient goes through draws."""
    tensor: Tensor = ops.convert_to_tensor(value)
    return torch.broadcast_to(tensor.detach().float(), tuple(shape))


def _dtype(dtype: Any) -> torch.dtype:
    type_: torch.dtype = backend_core.to_torch_dtype(dtype or keras.config.floatx())
    return type_
