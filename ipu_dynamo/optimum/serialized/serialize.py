"""Choose which of the embedding and the head run in parts, and put these in their place."""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ipu_dynamo.optimum.serialized.serialized_embedding import (
    SerializedEmbedding,
    check_plain_embedding,
)
from ipu_dynamo.optimum.serialized.serialized_linear import (
    OUTPUT_CHANNELS,
    SerializedLinear,
    SplitProjection,
)

if TYPE_CHECKING:
    from ipu_dynamo.optimum.config import IPUConfig

log = logging.getLogger(__name__)
_ATTRIBUTES = "factor", "mode"  # what a SerializedLinear has more than a linear layer


@dataclass(frozen=True)
class Choice:
    """What is to be in parts, and where.

    Args:
        embedding: tables of the embedding, 1 for the whole one.
        projection: parts of the head's product.
        separate: the head's parts are layers of their own.
        embedding_splits, projection_splits: parts on each IPU, by which blocks begin.
        tied_ipu: of a tied table and its head, where splits say it.
    """

    table: nn.Module | None = None
    head: nn.Module | None = None
    embedding: int = 1
    projection: int = 1
    separate: bool = False
    embedding_splits: tuple[int, ...] = ()
    projection_splits: tuple[int, ...] = ()
    tied_ipu: int | None = None


@dataclass
class Swaps:
    """What has been put into a model, and how it was before.

    Args:
        replaced: path of the parent, name in it, and the module that was there.
        parts: what stands there instead.
        reclassed: path of a linear layer that became a serialised one, and its own attributes of
            those names that a serialised one uses.
    """

    replaced: list[tuple[str, str, nn.Module]] = field(default_factory=list)
    parts: list[nn.Module] = field(default_factory=list)
    reclassed: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def choose(model: nn.Module, config: "IPUConfig") -> Choice:
    """What a configuration asks for, by the fields of its mode.

    Raises:
        ValueError: parts of a tied table on several IPUs, or of layers that cannot be cut.
    """
    table, head = _own(model, "get_input_embeddings"), _own(model, "get_output_embeddings")
    splits = config._serialized_embedding_splits_per_ipu
    head_splits = config._serialized_projection_splits_per_ipu
    e = sum(splits) if splits else config._embedding_serialization_factor or 1
    p = sum(head_splits) if head_splits else config._projection_serialization_factor or 1
    own_table = table if isinstance(table, nn.Embedding) else None
    own_head = head if isinstance(head, nn.Linear) else None
    for wanted, layer, what in ((e, own_table, "an embedding"), (p, own_head, "a head")):
        if wanted > 1 and layer is None:
            log.warning("%s has not got %s that could be in parts", type(model).__name__, what)
    if own_table is None or own_head is None or own_table.weight is not own_head.weight:
        if own_table is not None and e > 1:
            check_plain_embedding(own_table)
        if own_head is not None and p > 1:
            _check_plain_linear(own_head)
        return Choice(
            own_table,
            own_head,
            e if own_table is not None else 1,
            p if own_head is not None else 1,
            separate=bool(head_splits),
            embedding_splits=tuple(splits) if splits and own_table is not None and e > 1 else (),
            projection_splits=tuple(head_splits)
            if head_splits and own_head is not None and p > 1
            else (),
        )
    name = config._get_managed_attr_mode_name("serialized_embedding_splits_per_ipu")
    if splits:
        raise ValueError(
            f"{name}={splits}, but the head is tied to the embedding and reads the whole table: "
            "use a serialization factor"
        )
    ipus = [ipu for ipu, count in enumerate(head_splits or ()) if count]
    if len(ipus) > 1:
        name = config._get_managed_attr_mode_name("serialized_projection_splits_per_ipu")
        raise ValueError(
            f"{name}={head_splits}, but the head is tied to the embedding, so all of it is on one "
            "IPU: leave one entry that is not 0"
        )
    if e > 1 and p > 1 and e != p:
        log.warning(
            "the head is tied to the embedding: its product is in %d parts, and the embedding's "
            "factor %d has nothing to act on",
            p,
            e,
        )
    factor = p if p > 1 else e
    if factor > 1:
        _check_plain_linear(own_head)
    return Choice(own_table, own_head, 1, factor, tied_ipu=ipus[0] if ipus else None)


def put_in(model: nn.Module, choice: Choice, swaps: Swaps) -> None:
    """Put layers in parts into a model; `swaps` knows at any time what has been done."""
    if choice.embedding > 1:
        assert isinstance(choice.table, nn.Embedding)
        layer = SerializedEmbedding.filled_up(choice.table, choice.embedding)
        for path, module in list(model.named_modules(remove_duplicate=False)):
            if getattr(module, "weight", None) is choice.table.weight and path:
                check_plain_embedding(module)
                _replace(model, path, layer, swaps)
        swaps.parts.append(layer)
    if choice.projection > 1 and choice.head is not None:
        assert isinstance(choice.head, nn.Linear)
        paths = [p for p, m in model.named_modules(remove_duplicate=False) if m is choice.head]
        if choice.separate:
            projection = SplitProjection.filled_up(choice.head, choice.projection)
            for path in paths:
                _replace(model, path, projection, swaps)
            swaps.parts.append(projection)
        else:
            head: Any = choice.head
            own = {name: vars(head)[name] for name in _ATTRIBUTES if name in vars(head)}
            swaps.reclassed.append((paths[0], own))
            head.factor, head.mode = choice.projection, OUTPUT_CHANNELS
            head.__class__ = SerializedLinear


def take_out(model: nn.Module, swaps: Swaps, *, weights: bool) -> None:
    """Put the layers back that `put_in` has replaced.

    Args:
        weights: they get the weights and modes of now; else they are as they were.
    """
    for path, own in swaps.reclassed:
        head: Any = model.get_submodule(path)
        head.__class__ = nn.Linear
        for name in _ATTRIBUTES:
            vars(head).pop(name, None)
        vars(head).update(own)
    for parent, name, module in reversed(swaps.replaced):
        owner = model.get_submodule(parent)
        part: Any = owner._modules[name]
        if weights:
            _write_back(part, module)
        owner._modules[name] = module


def _write_back(part: Any, module: Any) -> None:
    """Give a plain layer the weights and modes of the parts that stood for it."""
    first = next(iter(part.children()))[0]
    _set(module.weight, part.whole_weight())
    module.weight.requires_grad_(first.weight.requires_grad)
    if getattr(part, "bias", None) is not None:
        _set(module.bias, part.bias.detach().clone())
        module.bias.requires_grad_(part.bias.requires_grad)
    module.training = part.training


def _set(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter a value: in its own memory, which others may share, if it has that form."""
    if (parameter.dtype, parameter.device) == (value.dtype, value.device):
        parameter.data.copy_(value)
    else:
        parameter.data = value


def _replace(model: nn.Module, path: str, layer: nn.Module, swaps: Swaps) -> None:
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    before = owner._modules[name]
    assert before is not None
    swaps.replaced.append((parent, name, before))
    owner._modules[name] = layer


def _own(model: nn.Module, method: str) -> Any:
    """What a method of transformers' models gives; None where there is none."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _check_plain_linear(head: nn.Module) -> None:
    if type(head) is not nn.Linear:
        raise ValueError(
            f"a head of class {type(head).__name__} may do more than its product, so that cannot "
            "be in parts: leave projection_serialization_factor and splits out"
        )
