"""Record what programs train, so that it can be checked when they have ended."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import poptorch


class EnoughSteps(BaseException):
    """The program has trained as many steps as are wanted; not an Exception: none catches it."""


@dataclass
class Training:
    """What one executor trained.

    Args:
        executor: that trained.
        before: the trainable parameters before the first call, by name.
        results: what each call returned.
    """

    executor: "poptorch.PoplarExecutor"  # a string: only the child needs what compiles
    before: dict[str, Tensor]
    results: list[Any] = field(default_factory=list)

    def after(self) -> dict[str, Tensor]:
        """The trainable parameters as they are now."""
        return _trainable(self.executor.model)


TRAININGS: list[Training] = []


def record(enough: int) -> None:
    """Note every training call from now on, and end the program behind call number `enough`."""
    call = poptorch.PoplarExecutor.__call__

    def recorded(executor: poptorch.PoplarExecutor, *args: Any, **kwargs: Any) -> Any:
        if executor._optimizer is None:
            return call(executor, *args, **kwargs)
        training = next((t for t in TRAININGS if t.executor is executor), None)
        if training is None:
            training = Training(executor, _trainable(executor.model))
            TRAININGS.append(training)
        result = call(executor, *args, **kwargs)
        training.results.append(result)
        if sum(len(t.results) for t in TRAININGS) == enough:
            raise EnoughSteps
        return result

    poptorch.PoplarExecutor.__call__ = recorded  # type: ignore[method-assign]


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


def numbers(result: Any) -> list[Tensor]:
    """All floating-point tensors of a result."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list | tuple):
        return [tensor for part in result for tensor in numbers(part)]
    return []


def check_that_it_trained() -> None:
    """Fail unless results are finite, and three of four parameters have changed to finite values.

    Those that have not may have had gradients that are too small for their type.
    """
    assert TRAININGS, "it trained nothing"
    for training in TRAININGS:
        tensors = numbers(training.results)
        assert tensors, "no number came back"
        assert all(torch.isfinite(t).all() for t in tensors), "a result is not finite"
        after = training.after()
        assert all(torch.isfinite(t).all() for t in after.values()), "a weight is not finite"
        before = training.before.items()
        same = [name for name, value in before if torch.equal(value, after[name])]
        assert 4 * len(same) <= len(after), f"{len(same)} of {len(after)} did not: {same[:5]}"
