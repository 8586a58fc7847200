"""Update parameters by one function of all gradients, weights, states and hyperparameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipu_dynamo.errors import InputError

Tensors = dict[str, Tensor]
Apply = Callable[[Tensors, Tensors, Tensors, dict[str, Any]], tuple[Tensors, Tensors]]


class TracedUpdate(Optimizer):
    """An update that is one function of everything, for `compile_training`.

    It is traced once, and part of the program. Parameters may be updated by each other's gradients:
    a norm of all of them, or whether all are finite. Outside a program `step` makes the same
    update, with the parameters' own gradients.

    Args:
        state: the values that the update keeps between steps: tensors by name, or numbers, which
            become tensors. A tensor is read and written in place: when the state is exchanged, by
            `state_dict` and `load_state_dict` or by `read_optimizer_state` and
            `write_optimizer_state` of the compiled model. A state that is combined with one
            parameter only lives with it; one called as a parameter, a dot and a word is that
            variable of the program. All others are on one IPU.
        apply: takes gradients and weights, by the parameters' names in the model, states and
            hyperparameters, by theirs; returns new weights and new states. Names that it leaves out
            are not changed. It runs while tracing only. Parameters without a gradient are in
            neither of the first two. Gradients are those of the whole step: summed over
            micro-batches and replicas, averaged, unscaled and clipped as the options say. Weights
            in half precision and their gradients come as float32, and the new weights are rounded.
        hyperparameters: numbers, in `param_groups[0]`, where learning rate schedulers find them. A
            change acts from the next call on. While tracing they are symbols. If a decision of
            `apply` in Python would change with their values, it is traced again. It decides by
            tensors with `torch.where`.

    Raises:
        CompileError: when the program is compiled, with the line: `apply` asks for the value of a
            tensor, reads one that is in no argument, or does not do the same twice.
        InputError: it returns something else than two mappings of tensors, a name that it has not
            got, or another shape.

    Example:
        def apply(gradients, weights, states, numbers):
            norm = sum(g.square().sum() for g in gradients.values()).sqrt()
            factor = numbers["lr"] / torch.clamp(norm, min=1.0)
            return {n: weights[n] - g * factor for n, g in gradients.items()}, {}

        step = compile_training(model, TracedUpdate({}, apply, {"lr": 0.1}))
    """

    def __init__(
        self,
        state: Mapping[str, Tensor | float],
        apply: Apply,
        hyperparameters: Mapping[str, float] | None = None,
    ) -> None:
        numbers = dict(hyperparameters or {})
        super().__init__([{"params": [], "param_names": [], **numbers}], {})
        self._apply = apply
        states: dict[Any, Any] = self.state
        for name, value in state.items():
            states[name] = value if isinstance(value, Tensor) else torch.tensor(value)

    def use_parameters_of(self, model: nn.Module) -> None:
        """Update the parameters of `model` that need a gradient.

        Args:
            model: a module.

        Raises:
            InputError: it updates those of another model already.
        """
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        group = self.param_groups[0]
        known = group["params"]
        if known and [id(p) for p in known] != [id(p) for _, p in named]:
            raise InputError(
                "this update has the parameters of another model",
                hint="make a TracedUpdate for each model",
            )
        group["params"] = [p for _, p in named]
        group["param_names"] = [name for name, _ in named]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update once by the parameters' own gradients.

        Args:
            closure: None; the argument is that of every optimiser of torch.
        """
        (group,) = self.param_groups
        pairs = zip(group["param_names"], group["params"], strict=True)
        weights = {name: p for name, p in pairs if p.grad is not None}
        gradients = {name: p.grad for name, p in weights.items()}
        states: Tensors = {str(name): held for name, held in self.state.items()}
        numbers = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        new = self._apply(gradients, dict(weights), dict(states), numbers)
        new_weights, new_states = _checked_pair(new)
        _check("weight", new_weights, weights)
        _check("state", new_states, states)
        # copies: a tensor that is written may also be another result
        changed = [(weights[name], value.clone()) for name, value in new_weights.items()]
        changed += [(states[name], value.clone()) for name, value in new_states.items()]
        for target, value in changed:
            target.copy_(value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state; tensors of the same shape stay the same ones."""
        known = dict(vars(self).get("state", {}))
        super().__setstate__(state)
        for name, value in self.state.items():
            held = known.get(name)
            if isinstance(held, Tensor) and held.shape == value.shape:
                with torch.no_grad():
                    held.copy_(value)
                self.state[name] = held


def _checked_pair(new: object) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    if not isinstance(new, (tuple, list)) or len(new) != 2:
        problem = f"the update returns a {type(new).__name__} instead of new weights and new states"
        raise InputError(problem, hint="return weights, states; {} where none changes")
    for what, part in zip(("weights", "states"), new, strict=True):
        if not isinstance(part, Mapping):
            problem = f"the update returns a {type(part).__name__} as new {what}"
            raise InputError(problem, hint="return names with tensors; {} where none changes")
    new_weights, new_states = new
    return new_weights, new_states


def _check(what: str, new: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
    for name, value in new.items():
        if name not in known:
            raise InputError(f"the update returns a {what} {name!r}, and has none of that name")
        if not isinstance(value, Tensor):
            problem = f"the update returns a {what} {name!r} that is a {type(value).__name__}"
            raise InputError(problem, hint="return a tensor, as of torch.full_like(known, value)")
        if value.shape != known[name].shape:
            raise InputError(
                f"the update returns a {what} {name!r} of shape {list(value.shape)}, which was "
                f"{list(known[name].shape)}"
            )
