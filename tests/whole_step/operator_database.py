"""Run PyTorch's operator database through `compile_training` beside eager PyTorch.

Each operator stands between a trainable scale of its inputs and the loss.

Usage: python -m tests.whole_step.operator_database [NAME ...]
       [--samples N] [--every N] [--dtypes D ...] [--out FILE]
What the file has is not run again.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ipu_dynamo
from ipu_dynamo import Options
from tests.operator_lists import RANDOM_BEGINNINGS
from tests.torch_compile.database import database
from tests.whole_step.database_runs import NotInEagerError, compare, main

DTYPES = ("float32", "float16", "int32", "bool")
OPERATORS = {info.formatted_name: info for info in database.op_db}
# What the database seeds inside an operator is the caller's to seed.
database.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
torch.backends.__allow_nonbracketed_mutation_flag = True


class Scaled(nn.Module):
    """An operator whose floating-point inputs are scaled, and whose results make the loss."""

    def __init__(self, info: Any, sample: Any) -> None:
        super().__init__()
        self.has_gradient = info.supports_autograd
        self.scale = nn.Parameter(torch.ones(()))
        self.operator = info.op
        leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [leaves[place].detach() for place in self.places]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        loss, results = self.computed(*tensors)
        return ipu_dynamo.identity_loss(loss, "none"), results

    def computed(self, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The loss, not marked as such, and results."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            scale = self.scale.to(tensor.dtype)
            scale = scale if self.has_gradient else scale.detach()
            leaves[place] = tensor * scale if tensor.is_floating_point() else tensor.clone()
        positional, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        found = pytree.tree_leaves(self.operator(positional, *args, **kwargs))
        results = [leaf for leaf in found if isinstance(leaf, Tensor)]
        loss = self.scale * 0.5
        for result in results:
            if result.is_floating_point():
                loss = loss + (result.float() / 8).tanh().sum()
        return loss, results


def samples(name: str, dtype: str, count: int) -> list[Any]:
    """The first samples of an operator whose tensors are dense and have elements."""
    info = OPERATORS[name]
    torch.manual_seed(0)
    found = info.sample_inputs("cpu", getattr(torch, dtype), requires_grad=False)
    return list(itertools.islice(filter(_is_full, found), count))


def _is_full(sample: Any) -> bool:
    tensors = _tensors((sample.input, sample.args, sample.kwargs))
    return all(t.layout == torch.strided and t.numel() for t in tensors)


def names_with(dtype: str) -> list[str]:
    """The operators that eager PyTorch has for a type."""
    wanted = getattr(torch, dtype)
    return [name for name, info in OPERATORS.items() if wanted in info.supported_dtypes("cpu")]


def check(name: str, dtype: str, *, count: int = 1) -> None:
    """Compare a step of each sample: results, the loss, and the scale after its update.

    Raises:
        NotInEagerError: there is nothing to compare with.
    """
    for check_sample in checks(name, dtype, count):
        check_sample()


def checks(name: str, dtype: str, count: int) -> Iterator[Callable[[], None]]:
    """What compares each of the first samples."""
    if name in RANDOM_BEGINNINGS:
        raise NotInEagerError("it begins with random numbers, which are others in a program")
    models = [Scaled(OPERATORS[name], sample) for sample in samples(name, dtype, count)]
    if not any(model.tensors for model in models):
        raise NotInEagerError("no sample has dense tensors with elements")
    yield from (partial(check_model, model, dtype) for model in models)


def check_model(model: nn.Module, dtype: str, engine: str = "eager") -> ipu_dynamo.CompiledModel:
    """Compare a step of a model, which has `tensors`, with plain PyTorch's; what was compiled."""
    plain = copy.deepcopy(model)
    expected = plain_step(plain)
    step = ipu_dynamo.compile_training(
        model, torch.optim.SGD(model.parameters(), lr=0.01), Options(engine=engine)
    )
    values = step(*[tensor.clone() for tensor in model.tensors])
    compare((values, _weights(model)), (expected, _weights(plain)), dtype)
    return step


def _weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def plain_step(plain: nn.Module) -> Any:
    """Loss and results of a step of plain PyTorch, which computes the same twice.

    Raises:
        NotInEagerError: it does not.
    """
    before = copy.deepcopy(plain.state_dict())
    try:
        outcomes = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            plain.load_state_dict(before)
            plain.zero_grad()
            outcomes.append(plain(*[tensor.clone() for tensor in plain.tensors]))
        (_, first), (loss, results) = outcomes
        for a, b in zip(first, results, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
        loss.backward()
        torch.optim.SGD(plain.parameters(), lr=0.01).step()
    except Exception as error:
        raise NotInEagerError(str(error)) from error
    return loss.detach(), [result.detach() for result in results]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


if __name__ == "__main__":
    main(__doc__, DTYPES, names_with, checks)
