"""Place a model on IPUs as a configuration says, without changing its class, and undo that."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from ipu_dynamo import blocks
from ipu_dynamo.optimum.checkpoint import recomputation_checkpoint
from ipu_dynamo.optimum.config import IPUConfig, own_config
from ipu_dynamo.optimum.layer_counts import get_layer_ipu
from ipu_dynamo.optimum.placement.block_placement import Part, Placed, place
from ipu_dynamo.optimum.placement.counted_calls import Calls, StartAtEachCall, WarnOfUncalled
from ipu_dynamo.optimum.placement.find_layers import LayerList, find_layer_lists
from ipu_dynamo.optimum.placement.layer_plans import plan_for
from ipu_dynamo.optimum.placement.traced_layers import Sample, check_sample, in_order_of_calls
from ipu_dynamo.optimum.serialized.serialize import choose
from ipu_dynamo.optimum.serialized.swap_layers import Swaps, put_in, take_out
from ipu_dynamo.optimum.values.pod_types import DEFAULT

log = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=nn.Module)


@dataclass
class _Changes:
    """The changes of `parallelize` to a model."""

    handles: list[RemovableHandle] = field(default_factory=list)
    swaps: Swaps = field(default_factory=Swaps)

    def undo(self, *, weights: bool) -> None:
        """Take it all back.

        Args:
            weights: parts may have been trained: the whole layers get their weights.
        """
        for handle in self.handles:
            handle.remove()
        take_out(self.swaps, weights=weights)


# Kept outside of the models, which get no new attribute.
_parallelized: "WeakKeyDictionary[nn.Module, _Changes]" = WeakKeyDictionary()


def parallelize(
    model: _Model,
    ipu_config: Any,
    layers: str | Sequence[str] | None = None,
    sample: Sample | None = None,
) -> _Model:
    """Place a model's layers on IPUs, in place; `deparallelize` undoes it.

    The lists of layers are found by rule. Tied heads, and embeddings that a decoder shares, are on
    the IPU of their table. The table of parts and IPUs is logged.

    Args:
        model: one of transformers, or any module with lists of layers.
        ipu_config: an IPUConfig; the fields of its mode count.
        layers: the path of the list, or several in the order in which they run.
        sample: arguments of a call with one micro-batch: lists are then ordered by their calls,
            and "auto" can be planned.

    Returns:
        the model.

    Raises:
        TypeError: it is no module, such as a model that is wrapped in an executor already; or
            `sample` is no tuple or dictionary.
        RuntimeError: it is parallelized already, or a copy of a model that was.
        ValueError: there is no list of layers, or several are possible, or the model cannot be
            placed by the configuration. The model is as before.
        IncompatibleIPUConfigError: the configuration's layers are not those of the model.
    """
    _check_module(model)
    if model in _parallelized:
        raise RuntimeError(
            f"this {type(model).__name__} is parallelized already: call deparallelize(model) first"
        )
    _check_no_copy(model)
    check_sample(sample)
    own = own_config(ipu_config)
    config = copy.copy(own._plain())  # "auto" is replaced in it alone until nothing can fail
    lists = find_layer_lists(model, layers)
    if sample is not None and layers is None and len(lists) > 1:
        lists = in_order_of_calls(model, lists, sample)
    auto = config._layers_per_ipu == "auto"
    if auto:
        config._layers_per_ipu = plan_for(model, lists, sample, config).layers_per_ipu
    changes = _Changes()
    try:
        placed = _apply(model, lists, config, changes)
    except BaseException:
        changes.undo(weights=False)
        raise
    _parallelized[model] = changes
    if auto:
        _write_back(own, config._layers_per_ipu)
    log.info("%s\n%s", type(model).__name__, table(placed.parts))
    return model


def _write_back(config: IPUConfig, counts: list[int]) -> None:
    """Put planned integers where "auto" stood, which may be the "default" of types of POD."""
    given = config._layers_per_ipu
    config._layers_per_ipu = {**given, DEFAULT: counts} if isinstance(given, dict) else counts


def _apply(
    model: nn.Module, lists: Sequence[LayerList], config: IPUConfig, changes: _Changes
) -> Placed:
    numbered = [layer for one in lists for layer in one.layers]
    ipus = get_layer_ipu(config, numbered)
    choice = choose(model, config)
    put_in(model, choice, changes.swaps)
    placed = place(model, lists, ipus, choice)
    calls = Calls()
    changes.handles.append(model.register_forward_pre_hook(calls))
    for begin in placed.begins:
        if blocks.begins_block(begin.module):
            raise ValueError(
                f"{begin.name} begins a block already: remove that first "
                "(ipu_dynamo.blocks.remove_blocks)"
            )
        hook = StartAtEachCall(begin.name, begin.ipu, calls)
        changes.handles.append(begin.module.register_forward_pre_hook(hook))
    layers = [begin.name for begin in placed.begins if begin.module in set(numbered)]
    changes.handles.append(model.register_forward_hook(WarnOfUncalled(layers, calls)))
    if config.recompute_checkpoint_every_layer:
        changes.handles += [recomputation_checkpoint(layer) for layer in numbered]
    return placed


def deparallelize(model: _Model) -> _Model:
    """Undo `parallelize`: classes, attributes and hooks are those of before, weights those of now.

    Args:
        model: the result of `parallelize`; it is changed in place and returned.

    Raises:
        RuntimeError: the model is not parallelized.
    """
    _check_module(model)
    changes = _parallelized.pop(model, None)
    if changes is None:
        _check_no_copy(model)
        raise RuntimeError(f"this {type(model).__name__} is not parallelized")
    changes.undo(weights=True)
    return model


def _check_module(model: Any) -> None:
    if not issubclass(type(model), nn.Module):
        raise TypeError(
            f"a torch.nn.Module is needed, not {type(model).__name__}: pass the model itself, "
            "before it is wrapped or compiled"
        )


def _check_no_copy(model: nn.Module) -> None:
    """Refuse the copy of a parallelized model: it has the hooks, and no record to undo them."""
    if any(isinstance(hook, Calls) for hook in model._forward_pre_hooks.values()):
        raise RuntimeError(
            f"this {type(model).__name__} is a copy of a parallelized model, which cannot be "
            "undone or placed anew: copy a model before parallelize, or after deparallelize"
        )


def is_parallelized(model: nn.Module) -> bool:
    """Whether `parallelize` has placed this model, and nothing has undone it."""
    return model in _parallelized


def table(parts: Sequence[Part]) -> str:
    """Part, IPU, parameters and bytes, one line for each part of a model, and each IPU's sum."""
    lines = [
        (part.path, f"{'' if part.begins else '~'}{part.ipu}", part.parameters, part.nbytes)
        for part in parts
    ]
    for ipu in sorted({part.ipu for part in parts}):
        on = [part for part in parts if part.ipu == ipu]
        sums = sum(part.parameters for part in on), sum(part.nbytes for part in on)
        lines.append(("all", str(ipu), *sums))
    width = max([4, *(len(line[0]) for line in lines)])
    head = f"{'part':<{width}} {'IPU':>4} {'parameters':>12} {'bytes':>14}"
    foot = (
        "~ runs in the block that is open when it is called: here, if modules stand in that order"
    )
    rows = [f"{p:<{width}} {i:>4} {n:>12} {b:>14}" for p, i, n, b in lines]
    return "\n".join([head, *rows, foot])
