"""Compare compiled models with plain PyTorch; say which tensor differs, where, and how much."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from ipu_dynamo.options import Options
from ipu_dynamo.progress import begin, job
from ipu_dynamo.testing.private.testing_names import pytree
from ipu_dynamo.testing.reference import Loss, Reference, named_tensors
from ipu_dynamo.whole_step.api import compile_inference, compile_training
from ipu_dynamo.whole_step.compiled_model import CompiledModel
from ipu_dynamo.whole_step.lowering import model_name

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Call = Sequence[Any] | Mapping[str, Any] | Tensor


def assert_same_training(
    model: nn.Module,
    data: Iterable[Call],
    options: Options | dict[str, Any] | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    steps: int | None = None,
    loss: Loss = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> CompiledModel:
    """Assert that `compile_training` trains a model as plain PyTorch does.

    Both train a copy, so `model` stays as it is. After every call these must agree: returned
    tensors, inputs changed in place, parameters, buffers, and the optimiser's states. The default
    optimiser is SGD with momentum, whose momentum after the first update is the gradient.

    Plain PyTorch runs the micro-batches one by one. Gradients are summed over accumulation steps
    and replicas, and divided by their number if `options.reduction` is `mean`. Outputs are joined
    by the output mode. Each replica has its own buffers; replica 0's are the model's.

    Args:
        model: as for `compile_training`. Dropout must be off: the two draw different masks.
        data: one item for each call: a sequence of positional arguments, a mapping of keyword
            arguments, or the only argument.
        options: see `ipu_dynamo.Options`.
        optimizer: makes an optimiser for a copy of the model.
        steps: how many calls to make; `data` starts again where it is shorter. None: all of it.
        loss: which returned tensor plain PyTorch differentiates: its index, which is then passed
            to `compile_training` too, or a function that picks it from the returned value. None:
            the only differentiable tensor of one element.
        rtol: relative tolerance: a tensor agrees if max |difference| <= rtol * max |value| + atol.
        atol: absolute tolerance.

    Returns:
        The compiled model, trained: to look at its program.

    Raises:
        AssertionError: names call, tensor, element and difference.

    Example:
        model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
        assert_same_training(
            WithLoss(model),
            [(torch.randn(16, 4), torch.randint(2, (16,)))],
            Options(gradient_accumulation=4, device_iterations=2),
            optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
            steps=3,
        )
    """
    make, read = optimizer or _momentum, Options.read(options)
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    our_optimizer, their_optimizer = make(ours), make(theirs)
    index = loss if isinstance(loss, int) else None
    compiled = compile_training(ours, our_optimizer, read, loss=index)
    reference = Reference(theirs, read, their_optimizer, loss)

    def states() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        compiled.read_optimizer_state()
        return _states(ours, our_optimizer), _states(theirs, their_optimizer)

    _compare(compiled, reference, data, steps, rtol=rtol, atol=atol, states=states)
    return compiled


def assert_same_inference(
    model: nn.Module,
    data: Iterable[Call],
    options: Options | dict[str, Any] | None = None,
    *,
    steps: int | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> CompiledModel:
    """Assert that `compile_inference` gives the results of plain PyTorch.

    Returned tensors, inputs changed in place and buffers are compared after every call; see
    `assert_same_training`, also for the arguments.

    Args:
        model: as for `compile_inference`.
        data: one item for each call, as for `assert_same_training`.
        options: see `ipu_dynamo.Options`.
        steps: how many calls to make, as for `assert_same_training`.
        rtol: relative tolerance, as for `assert_close`.
        atol: absolute tolerance, as for `assert_close`.

    Example:
        assert_same_inference(model.eval(), [torch.randn(8, 4)], {"device_iterations": 2})
    """
    read = Options.read(options)
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    compiled = compile_inference(ours, read)
    _compare(compiled, Reference(theirs, read), data, steps, rtol=rtol, atol=atol)
    return compiled


def assert_close(
    actual: Any,
    expected: Any,
    what: str = "value",
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    same_dtype: bool = True,
) -> None:
    """Assert that nested structures agree: structure, Python values, shapes, dtypes and numbers.

    Args:
        actual: a tensor or a nested structure.
        expected: the structure that it is compared with.
        what: name of the whole, for the message.
        rtol: a tensor agrees if max |difference| <= rtol * max |value| + atol. Integers, booleans,
            infinities and NaN have to be equal.
        atol: see `rtol`.
        same_dtype: whether dtypes must be equal too.

    Raises:
        AssertionError: names tensor, element and difference.
    """
    for name, ours, theirs in _pairs(actual, expected, what):
        problem = _layout_problem(ours, theirs, same_dtype)
        problem = problem or _number_problem(ours, theirs, _Tolerance(rtol, atol))
        if problem:
            raise AssertionError(f"{name}: {problem}")


def assert_same_bits(actual: Any, expected: Any, what: str = "value") -> None:
    """Assert that nested structures are the same to the last bit; signs of zeros and NaN count.

    Args:
        actual: a tensor or a nested structure.
        expected: the structure that it is compared with.
        what: name of the whole, for the message.

    Raises:
        AssertionError: names tensor, element and both values.

    Example:
        assert_same_bits(step(x), another_run_of_step(x))
    """
    for name, ours, theirs in _pairs(actual, expected, what):
        problem = _layout_problem(ours, theirs, same_dtype=True)
        if not problem and isinstance(ours, Tensor):
            unequal = _bits(ours).ne(_bits(theirs)).any(-1)
            problem = _at(unequal, ours, theirs) if unequal.any() else ""
        if problem:
            raise AssertionError(f"{name}: {problem}")


@dataclass(frozen=True, slots=True)
class _Tolerance:
    rtol: float
    atol: float

    def limit(self, expected: Tensor) -> float:
        finite = expected[expected.isfinite()].abs()
        return self.rtol * (finite.max().item() if len(finite) else 0.0) + self.atol

    def __str__(self) -> str:
        return f"{self.rtol:g} * max |value| + {self.atol:g}"


def _compare(
    compiled: CompiledModel,
    reference: Reference,
    data: Iterable[Call],
    steps: int | None,
    *,
    rtol: float,
    atol: float,
    states: Callable[[], tuple[dict[str, Tensor], dict[str, Tensor]]] | None = None,
) -> None:
    """Call both on copies of the same arguments; compare results and changed tensors."""
    calls = list(data)
    count = len(calls) if steps is None else steps
    title = f"comparing {model_name(compiled.model)} with plain PyTorch"
    with job(title, show=compiled.options.progress, then="calls"):
        for number, call in enumerate(islice(cycle(calls), count)):
            begin("calls", number + 1, count)
            (our_args, our_kwargs), (their_args, their_kwargs) = _arguments(call), _arguments(call)
            ours = compiled(*our_args, **our_kwargs)
            once = [output for output in compiled.program.outputs if output.returns == "once"]
            reference.once = frozenset(int(output.name) for output in once)
            theirs = reference(*their_args, **their_kwargs)
            assert isinstance(compiled.model, nn.Module)
            pairs: list[tuple[str, Any, Any]] = [
                ("returned value", ours, theirs),
                ("argument", (our_args, our_kwargs), (their_args, their_kwargs)),
                ("model", named_tensors(compiled.model), named_tensors(reference.model)),
            ]
            if states is not None:
                pairs.append(("optimizer", *states()))
            for what, actual, expected in pairs:
                assert_close(
                    actual,
                    expected,
                    f"call {number}, {what}",
                    rtol=rtol,
                    atol=atol,
                    same_dtype=not compiled.options.narrow,
                )


def _arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """Copies of the positional and the keyword arguments of a call."""
    if isinstance(call, Tensor):
        call = (call,)
    copied = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), call)
    return ([], dict(copied)) if isinstance(call, Mapping) else (list(copied), {})


def _pairs(actual: Any, expected: Any, what: str) -> list[tuple[str, Any, Any]]:
    """Leaves that correspond, with their paths."""
    ours, our_spec = pytree.tree_flatten_with_path(actual)
    theirs, their_spec = pytree.tree_flatten_with_path(expected)
    if our_spec != their_spec:
        raise AssertionError(f"{what}: structure {our_spec}, expected {their_spec}")
    return [
        (f"{what} {pytree.keystr(path)}" if path else what, our, their)
        for (path, our), (_, their) in zip(ours, theirs, strict=True)
    ]


def _layout_problem(ours: Any, theirs: Any, same_dtype: bool) -> str:
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
        same = type(ours) is type(theirs) and bool(ours == theirs)
        return "" if same else f"{ours!r}, expected {theirs!r}"
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)}, expected {list(theirs.shape)}"
    if same_dtype and ours.dtype != theirs.dtype:
        return f"{ours.dtype}, expected {theirs.dtype}"
    return ""


def _number_problem(ours: Any, theirs: Any, tolerance: _Tolerance) -> str:
    if not isinstance(ours, Tensor):
        return ""
    if not (ours.is_floating_point() or ours.is_complex()):
        return _at(ours != theirs, ours, theirs) if not torch.equal(ours, theirs) else ""
    wide = torch.complex128 if ours.is_complex() else torch.float64
    a, b = ours.to(wide), theirs.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    limit = tolerance.limit(b)
    if not difference.numel() or difference.max() <= limit:
        return ""
    worst = f"max |difference| {difference.max().item():.3g} > {limit:.3g} = {tolerance}"
    return f"{worst}; {_at(difference > limit, ours, theirs, difference)}"


def _at(wrong: Tensor, ours: Tensor, theirs: Tensor, difference: Tensor | None = None) -> str:
    """How many elements are wrong, and the worst (or first) of them."""
    flat = wrong.flatten() if difference is None else difference.flatten()
    position = int(flat.to(torch.float64).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(position), wrong.shape)]
    ours, theirs = ours.flatten()[position], theirs.flatten()[position]
    count = f"{int(wrong.sum())} of {wrong.numel()} elements"
    return f"{count}; at {index}: {ours.item()!r}, expected {theirs.item()!r}"


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of each element, in a last dimension of their own."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return dense.view(-1).view(torch.uint8).reshape(*tensor.shape, tensor.itemsize)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state tensors, named by state and parameter."""
    return {
        f"{state} of {name}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for state, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }
