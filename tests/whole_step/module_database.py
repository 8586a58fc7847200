"""Train and run PyTorch's database of modules beside eager PyTorch.

Each module stands between a trainable scale of its inputs and the loss.

Usage: python -m tests.whole_step.module_database [NAME ...]
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
from tests.torch_compile.database import modules
from tests.whole_step.database_runs import NotInEagerError, compare, main

DTYPES = ("float32",)
MODULES = {info.name: info for info in modules.module_db}
MODES = (True, False)  # training, inference


class Scaled(nn.Module):
    """A module whose floating-point inputs are scaled, and whose results make the loss."""

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        super().__init__()
        self.scale, self.module = nn.Parameter(torch.ones(())), module
        leaves, self.spec = pytree.tree_flatten(arguments)
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [leaves[place].detach() for place in self.places]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor * self.scale if tensor.is_floating_point() else tensor.clone()
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        values = pytree.tree_leaves(self.module(*args, **kwargs))
        results = [value for value in values if isinstance(value, Tensor)]
        loss = self.scale * 0.5
        for result in results:
            if result.is_floating_point():
                loss = loss + (result.float() / 8).tanh().sum()
        return ipu_dynamo.identity_loss(loss, "none"), results


def names_with(dtype: str) -> list[str]:
    """The modules that have a type."""
    return [name for name, info in MODULES.items() if getattr(torch, dtype) in info.dtypes]


def checks(name: str, dtype: str, count: int) -> Iterator[Callable[[], None]]:
    """What compares each of the first samples, training and in inference."""
    for training in MODES:
        for model in itertools.islice(_models(name, dtype, training), count):
            yield partial(_check, model, dtype)


def _models(name: str, dtype: str, training: bool) -> Iterator[Scaled]:
    info, wanted = MODULES[name], getattr(torch, dtype)
    torch.manual_seed(0)
    samples = info.module_inputs_func(
        info, device="cpu", dtype=wanted, requires_grad=False, training=training
    )
    for sample in samples:
        if sample.forward_input is None:
            continue
        built, given = sample.constructor_input, sample.forward_input
        torch.manual_seed(0)
        module = info.module_cls(*built.args, **built.kwargs).to(wanted).train(training)
        if any(map(nn.parameter.is_lazy, module.parameters())):
            module(*copy.deepcopy(given.args), **copy.deepcopy(given.kwargs))
        yield Scaled(module, (tuple(given.args), dict(given.kwargs))).train(training)


def _check(model: Scaled, dtype: str) -> None:
    plain = copy.deepcopy(model)
    expected = _eager(plain)
    tensors, options = [tensor.clone() for tensor in model.tensors], Options(engine="eager")
    if model.training:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        values = ipu_dynamo.compile_training(model, optimizer, options)(*tensors)
    else:
        values = ipu_dynamo.compile_inference(model, options)(*tensors)
    compare((values, _state(model)), (expected, _state(plain)), dtype)


def _eager(plain: Scaled) -> Any:
    before = copy.deepcopy(plain.state_dict())
    try:
        outcomes = []
        for seed in (1, 2):
            plain.load_state_dict(before)
            plain.zero_grad()
            torch.manual_seed(seed)
            outcomes.append(plain(*[tensor.clone() for tensor in plain.tensors]))
        (_, first), (loss, results) = outcomes
        compare(first, results)
        if plain.training:
            loss.backward()
            torch.optim.SGD(plain.parameters(), lr=0.01).step()
    except Exception as error:
        raise NotInEagerError(str(error)) from error
    return loss.detach(), [result.detach() for result in results]


def _state(model: nn.Module) -> list[Tensor]:
    return [value.detach() for value in model.state_dict().values()]


if __name__ == "__main__":
    main(__doc__, DTYPES, names_with, checks)
