"""Put layers in parts into a model in place of the whole ones, and take them out again."""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ipu_dynamo.optimum.serialized.serialize import Choice
from ipu_dynamo.optimum.serialized.serialized_embedding import (
    SerializedEmbedding,
    check_plain_embedding,
)
from ipu_dynamo.optimum.serialized.serialized_linear import (
    OUTPUT_CHANNELS,
    SerializedLinear,
    SplitProjection,
)
from ipu_dynamo.optimum.serialized.serialized_parts import check_replaceable

Parts = SerializedEmbedding | SplitProjection
_ATTRIBUTES = "factor", "mode"  # that a SerializedLinear has in addition to a linear layer
# Hooks that run at a call. Hooks on state are left out: parts have other names there.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_FULL = "_is_full_backward_hook"
# Parts that have stood for a layer, as long as a program or anything else has them.
_known: "WeakKeyDictionary[nn.Module, WeakSet[Parts]]" = WeakKeyDictionary()
_standing: "WeakSet[Parts]" = WeakSet()


@dataclass(frozen=True)
class _Swap:
    """A module of `owner` that `parts` has replaced."""

    owner: nn.Module
    name: str
    whole: nn.Module
    parts: Parts


@dataclass
class Swaps:
    """The replacements in a model, with the data to undo them.

    Args:
        replaced: modules that were replaced by parts.
        reclassed: linear layers that became serialised ones, each with its own attributes of
            those names that a serialised one uses.
    """

    replaced: list[_Swap] = field(default_factory=list)
    reclassed: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)


def put_in(model: nn.Module, choice: Choice, swaps: Swaps) -> None:
    """Replace layers of a model by parts; `swaps` records each replacement at once.

    Parts that a program still holds are used again, with the current weights, so that programs of
    training and inference share them.

    Raises:
        ValueError: a layer that parts cannot replace.
    """
    if choice.embedding > 1:
        assert isinstance(choice.table, nn.Embedding)
        weight = choice.table.weight
        paths = [
            path
            for path, module in model.named_modules(remove_duplicate=False)
            if getattr(module, "weight", None) is weight and path
        ]
        for path in paths:
            check_plain_embedding(model.get_submodule(path))
            check_replaceable(model.get_submodule(path))
        tables = _parts_for(choice.table, SerializedEmbedding, choice.embedding)
        _replace(model, paths, tables, swaps)
    if choice.projection > 1 and choice.head is not None:
        assert isinstance(choice.head, nn.Linear)
        if choice.separate:
            paths = [p for p, m in model.named_modules(remove_duplicate=False) if m is choice.head]
            parts = _parts_for(choice.head, SplitProjection, choice.projection)
            _replace(model, paths, parts, swaps)
        else:
            head: Any = choice.head
            own = {name: vars(head)[name] for name in _ATTRIBUTES if name in vars(head)}
            swaps.reclassed.append((head, own))
            head.factor, head.mode = choice.projection, OUTPUT_CHANNELS
            head.__class__ = SerializedLinear


def take_out(swaps: Swaps, *, weights: bool) -> None:
    """Restore the layers that `put_in` replaced, unless a user has replaced them since.

    Args:
        weights: they get the current weights and modes; else they are as they were.
    """
    for head, own in swaps.reclassed:
        if type(head) is SerializedLinear:
            head.__class__ = nn.Linear  # type: ignore[assignment]
            for name in _ATTRIBUTES:
                vars(head).pop(name, None)
            vars(head).update(own)
    for swap in reversed(swaps.replaced):
        if weights:
            _write_back(swap.parts, swap.whole)
        if swap.owner._modules.get(swap.name) is swap.parts:
            swap.owner._modules[swap.name] = swap.whole
        vars(swap.whole)[_FULL] = vars(swap.parts)[_FULL]
    for parts in {swap.parts for swap in swaps.replaced}:
        _standing.discard(parts)
        vars(parts).update({name: type(hooks)() for name, hooks in _hooks_of(parts).items()})


def _parts_for(whole: Any, kind: Any, factor: int) -> Parts:
    """The layer in parts, with the weights of the whole one and its mode.

    Args:
        kind: SerializedEmbedding or SplitProjection.
    """
    known = _known.setdefault(whole, WeakSet())
    for parts in known - _standing:
        if type(parts) is kind and parts.can_take(whole, factor):
            parts.take(whole)
            return parts
    made: Parts = kind.filled_up(whole, factor)
    known.add(made)
    return made


def _replace(model: nn.Module, paths: list[str], parts: Parts, swaps: Swaps) -> None:
    """Let one layer in parts stand for the modules at these paths, with their hooks.

    Raises:
        ValueError: several modules, of which one has hooks: they would run at calls of the others.
    """
    wholes = {model.get_submodule(path): path for path in reversed(paths)}
    hooked = [path for module, path in wholes.items() if any(_hooks_of(module).values())]
    if len(wholes) > 1 and hooked:
        raise ValueError(
            f"{', '.join(sorted(wholes.values()))} give way to one layer in parts, and "
            f"{hooked[0]} has hooks: remove them, or leave factor and splits out"
        )
    if len(wholes) == 1:
        (whole,) = wholes
        vars(parts).update(_hooks_of(whole))  # the same ones: handles of users remove them
        vars(parts)[_FULL] = vars(whole)[_FULL]
    _standing.add(parts)
    for path in paths:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        before = owner._modules[name]
        assert before is not None
        swaps.replaced.append(_Swap(owner, name, before, parts))
        owner._modules[name] = parts


def _hooks_of(module: nn.Module) -> dict[str, Any]:
    return {name: vars(module)[name] for name in _HOOKS}


def _write_back(parts: Any, whole: Any) -> None:
    """Give a plain layer the weights and modes of the parts that stood for it."""
    first = next(iter(parts.children()))[0]
    _set(whole.weight, parts.whole_weight())
    whole.weight.requires_grad_(first.weight.requires_grad)
    if getattr(parts, "bias", None) is not None:
        _set(whole.bias, parts.bias.detach().clone())
        whole.bias.requires_grad_(parts.bias.requires_grad)
    whole.training = parts.training


def _set(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter a value: in its own memory, which others may share, if it has that form."""
    if (parameter.dtype, parameter.device) == (value.dtype, value.device):
        with torch.no_grad():
            parameter.copy_(value)  # which programs that have it notice
    else:
        parameter.data = value
