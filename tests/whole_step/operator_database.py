"""Run PyTorch's operator database through `compile_training` beside eager PyTorch.

Each operator stands between a trainable scale of its inputs and the loss.

Usage: python -m tests.whole_step.operator_database [NAME ...]
       [--samples N] [--every N] [--dtypes D ...] [--out FILE]
What the file has is not run again.
"""

import argparse
import copy
import itertools
import json
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ipu_dynamo
from ipu_dynamo import Options
from tests.torch_compile.database import database

DTYPES = ("float32", "float16", "int32", "bool")
SECONDS = 60  # that a sample may take
OPERATORS = {info.formatted_name: info for info in database.op_db}
# What the database seeds inside an operator is the caller's to seed.
database.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
torch.backends.__allow_nonbracketed_mutation_flag = True


class NotInEagerError(Exception):
    """Plain PyTorch does not run a sample, or not twice with the same results."""


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
        return ipu_dynamo.identity_loss(loss, "none"), results


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
    models = _models(name, dtype, count)
    for model in models:
        _check(model, dtype)


def outcomes(name: str, dtype: str, count: int) -> Iterator[tuple[str, str]]:
    """What becomes of each sample, `passed`, `failed` or `not in eager`, and why."""
    try:
        models = _models(name, dtype, count)
    except Exception as error:
        yield "not in eager", _line(error)
        return
    for model in models:
        signal.alarm(SECONDS)
        try:
            _check(model, dtype)
            yield "passed", ""
        except NotInEagerError as error:
            yield "not in eager", _line(error)
        except Exception as error:
            yield "failed", f"{type(error).__name__}: {_line(error)}"
        finally:
            signal.alarm(0)


def _models(name: str, dtype: str, count: int) -> list[Scaled]:
    models = [Scaled(OPERATORS[name], sample) for sample in samples(name, dtype, count)]
    if not any(model.tensors for model in models):
        raise NotInEagerError("no sample has dense tensors with elements")
    return models


def _check(model: Scaled, dtype: str) -> None:
    plain = copy.deepcopy(model)
    expected = _eager(plain)
    step = ipu_dynamo.compile_training(
        model, torch.optim.SGD([model.scale], lr=0.01), Options(engine="eager")
    )
    found = step(*[tensor.clone() for tensor in model.tensors])
    _compare((*found, model.scale.detach()), (*expected, plain.scale.detach()), dtype)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or traceback.format_exc()[-200:]


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def _eager(plain: Scaled) -> Any:
    try:
        before = plain.scale.detach().clone()
        outcomes = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            plain.zero_grad()
            outcomes.append(plain(*[tensor.clone() for tensor in plain.tensors]))
        (_, first), (loss, results) = outcomes
        for a, b in zip(first, results, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
        loss.backward()
        with torch.no_grad():
            plain.scale.copy_(before - 0.01 * plain.scale.grad)
    except Exception as error:
        raise NotInEagerError(str(error)) from error
    return loss.detach(), [result.detach() for result in results]


def _compare(found: Any, expected: Any, dtype: str) -> None:
    half = {"rtol": 2e-2, "atol": 2e-2} if dtype == "float16" else {}
    ours, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert [(t.dtype, t.shape) for t in ours] == [(t.dtype, t.shape) for t in theirs]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, **half)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def main() -> None:
    """Say how many samples of each operator and type pass, why others do not, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--out", type=Path, help="a line of JSON for each operator and type")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _too_long)
    done: dict[tuple[str, str], dict[str, int]] = {}
    if arguments.out and arguments.out.exists():
        records = map(json.loads, arguments.out.read_text().splitlines())
        done = {(record["dtype"], record["name"]): record["counts"] for record in records}
    for dtype in arguments.dtypes:
        total: Counter[str] = Counter()
        for name in arguments.names or names_with(dtype)[:: arguments.every]:
            counts = done.get((dtype, name))
            total.update(_recorded(name, dtype, arguments) if counts is None else counts)
        print(dtype, dict(total), flush=True)


def _recorded(name: str, dtype: str, arguments: argparse.Namespace) -> dict[str, int]:
    """The counts of an operator, printed and written."""
    results = list(outcomes(name, dtype, arguments.samples))
    counts = Counter(kind for kind, _ in results)
    reasons = Counter(text for kind, text in results if kind == "failed")
    for text, count in reasons.items():
        print(f"{dtype} {name}: {count} of {len(results)}: {text}", flush=True)
    if arguments.out:
        record = {"dtype": dtype, "name": name, "counts": counts, "reasons": reasons}
        with arguments.out.open("a") as file:
            print(json.dumps(record), file=file)
    return dict(counts)


if __name__ == "__main__":
    main()
