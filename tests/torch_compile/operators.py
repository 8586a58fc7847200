"""Run PyTorch's operator database through torch.compile(backend="ipu") beside eager PyTorch.

Usage: python -m tests.torch_compile.operators [NAME ...]
       [--samples N] [--every N] [--dtypes D ...] [--out FILE]
What the file has is not run again.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.utils import _pytree as pytree

import ipu_dynamo
from ipu_dynamo.torch_compile.backend import ipu
from tests.operator_lists import UNDEFINED_VALUES
from tests.torch_compile.database import database
from tests.whole_step.database_runs import NotInEagerError, main, tolerance

# The database draws random numbers from a generator that it seeds inside the operator, which
# Dynamo does not trace. Here the caller seeds.
database.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
# Importing the database forbids all later changes of torch.backends' flags; others need them.
torch.backends.__allow_nonbracketed_mutation_flag = True

SAMPLES = 2
DTYPES = ("float32", "float16", "int32", "bool")
EVERY = {info.formatted_name: info for info in database.op_db}


def names_with(dtype: str) -> list[str]:
    """The operators that eager PyTorch has for a type."""
    wanted = getattr(torch, dtype)
    return [name for name, info in EVERY.items() if wanted in info.supported_dtypes("cpu")]


OPERATORS = {name: EVERY[name] for name in names_with("float32")}


@dataclass(frozen=True)
class Case:
    """One call of an operator, on inputs of its own."""

    operator: Any
    inputs: tuple[Any, ...]
    for_gradients: Any

    def copied_inputs(self) -> tuple[Any, ...]:
        return pytree.tree_map_only(Tensor, _copy, self.inputs)

    def call(self, positional: Any, args: Any, kwargs: Any) -> Any:
        return self.operator(positional, *args, **kwargs)


@dataclass(frozen=True)
class Outcome:
    """What a call returned, left in its inputs, and gave them as gradients."""

    results: Any
    inputs: list[Tensor]
    gradients: list[Tensor | None]


def cases(name: str, dtype: str = "float32", count: int = SAMPLES) -> Iterator[Case]:
    """The first samples of the operator `name`."""
    info, wanted = EVERY[name], getattr(torch, dtype)
    trained = info.supports_autograd and wanted in info.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    samples = info.sample_inputs("cpu", wanted, requires_grad=trained)
    for sample in itertools.islice(samples, count):
        inputs = (sample.input, sample.args, sample.kwargs)
        yield Case(info.op, inputs, sample.output_process_fn_grad)


def check(name: str, dtype: str = "float32", *, values: bool = True) -> None:
    """Compare some samples of `name`: results, changed inputs, gradients.

    Args:
        values: compare values too, and not shapes and dtypes alone.
    """
    for case in cases(name, dtype):
        check_case(case, dtype, values=values)


def all_captured() -> AbstractContextManager[None]:
    """Have Dynamo capture recurrent layers, and go on at a warning, which PyTorch's own code gives:
    what users are told to set."""
    return torch._dynamo.config.patch(allow_rnn=True, ignore_logging_functions={warnings.warn})


def checks(name: str, dtype: str, count: int) -> Iterator[Callable[[], None]]:
    """What compares each of the first samples."""
    values = name not in UNDEFINED_VALUES
    yield from (partial(check_alone, case, dtype, values) for case in cases(name, dtype, count))


def check_alone(case: Case, dtype: str, values: bool) -> None:
    """Compare a sample; Dynamo, which compiles a function for few samples, forgets it."""
    try:
        with all_captured():
            check_case(case, dtype, values=values)
    finally:
        torch._dynamo.reset()


def check_case(case: Case, dtype: str = "float32", *, values: bool = True) -> None:
    """Compare a sample.

    Raises:
        NotInEagerError: there is nothing to compare with.
    """
    try:
        expected = run(case, case.call)
    except Exception as error:
        raise NotInEagerError(str(error)) from error
    compiled = torch.compile(
        case.call, backend=ipu, fullgraph=True, dynamic=False, options={"engine": "eager"}
    )
    found = run(case, compiled)
    assert ipu_dynamo.programs(), "nothing was compiled"
    compare(found, expected, dtype, values=values)


def run(case: Case, call: Any) -> Outcome:
    """Call forward and backward with seeds of our own, so that random operators can be compared."""
    inputs = case.copied_inputs()
    torch.manual_seed(1)
    results = call(*inputs)
    leaves = [tensor for tensor in _tensors(inputs) if tensor.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    ends = [t for t in _tensors(case.for_gradients(results)) if t.requires_grad]
    if ends and leaves:
        torch.manual_seed(2)
        tangents = [torch.randn_like(end) for end in ends]
        gradients = torch.autograd.grad(ends, leaves, tangents, allow_unused=True)
    return Outcome(results, _tensors(inputs), list(gradients))


def compare(found: Outcome, expected: Outcome, dtype: str, *, values: bool) -> None:
    """Assert that two outcomes are the same, within rounding."""
    results, wanted = pytree.tree_leaves(found.results), pytree.tree_leaves(expected.results)
    assert [_kind(leaf) for leaf in results] == [_kind(leaf) for leaf in wanted]
    if values:
        _assert_close(results, wanted, "results", dtype)
        _assert_close(found.inputs, expected.inputs, "inputs after the call", dtype)
    unread = [gradient is None for gradient in expected.gradients]
    assert [gradient is None for gradient in found.gradients] == unread, "gradients that are None"
    pairs = zip(found.gradients, expected.gradients, strict=True)
    read = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
    ours, theirs = [ours for ours, _ in read], [theirs for _, theirs in read]
    _assert_close(ours, theirs, "gradients", dtype)


def _assert_close(found: list[Any], expected: list[Any], what: str, dtype: str) -> None:
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(
                one,
                other,
                equal_nan=True,
                msg=lambda text: f"{what}: {text}",
                **tolerance(dtype, other),
            )
        else:
            assert one == other, what


def _kind(leaf: Any) -> object:
    """All that is to be equal about a result, but for its values."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad, leaf.layout
    return type(leaf)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(__doc__, DTYPES, names_with, checks)
