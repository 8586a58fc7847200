"""Run PyTorch's operator database through torch.compile(backend="ipu") beside eager PyTorch."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import ipu_dynamo
from ipu_dynamo.torch_compile.backend import ipu
from tests.torch_compile.database import database

# The database draws random numbers from a generator that it seeds inside the operator, which
# Dynamo does not trace. Here the caller seeds.
database.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
# Importing the database forbids all later changes of torch.backends' flags; others need them.
torch.backends.__allow_nonbracketed_mutation_flag = True

SAMPLES = 2
OPERATORS = {
    info.formatted_name: info
    for info in database.op_db
    if torch.float32 in info.supported_dtypes("cpu")
}


class NotInEagerError(Exception):
    """Plain PyTorch cannot run a sample either."""


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


def cases(name: str) -> Iterator[Case]:
    """The first float32 samples of the operator `name`."""
    info = OPERATORS[name]
    torch.manual_seed(0)
    samples = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
    for sample in itertools.islice(samples, SAMPLES):
        inputs = (sample.input, sample.args, sample.kwargs)
        yield Case(info.op, inputs, sample.output_process_fn_grad)


def check(name: str, *, values: bool = True) -> None:
    """Compare every sample of `name`: results, changed inputs, gradients.

    Args:
        values: compare values too, and not shapes and dtypes alone.
    """
    for case in cases(name):
        try:
            expected = run(case, case.call)
        except Exception as error:
            raise NotInEagerError(name) from error
        compiled = torch.compile(
            case.call, backend=ipu, fullgraph=True, dynamic=False, options={"engine": "eager"}
        )
        found = run(case, compiled)
        assert ipu_dynamo.programs(), "nothing was compiled"
        compare(found, expected, values=values)


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


def compare(found: Outcome, expected: Outcome, *, values: bool) -> None:
    """Assert that two outcomes are the same, within float32 rounding."""
    results, wanted = pytree.tree_leaves(found.results), pytree.tree_leaves(expected.results)
    assert [_kind(leaf) for leaf in results] == [_kind(leaf) for leaf in wanted]
    if values:
        _assert_close(results, wanted, "results")
        _assert_close(found.inputs, expected.inputs, "inputs after the call")
    unread = [gradient is None for gradient in expected.gradients]
    assert [gradient is None for gradient in found.gradients] == unread, "gradients that are None"
    pairs = zip(found.gradients, expected.gradients, strict=True)
    read = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
    _assert_close([ours for ours, _ in read], [theirs for _, theirs in read], "gradients")


def _assert_close(found: list[Any], expected: list[Any], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(
                one, other, equal_nan=True, msg=lambda text: f"{what}: {text}"
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
