"""Choose which of the embedding and the head run in parts."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ipu_dynamo.optimum.serialized.serialized_embedding import check_plain_embedding
from ipu_dynamo.optimum.serialized.serialized_parts import check_replaceable

if TYPE_CHECKING:
    from ipu_dynamo.optimum.config import IPUConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The layers to compute in parts, and the IPUs of the parts.

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


def choose(model: nn.Module, config: "IPUConfig") -> Choice:
    """Choose layers to compute in parts, by the configuration's fields of its mode.

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
            check_replaceable(own_table)
        if own_head is not None and p > 1:
            _check_plain_linear(own_head)
            if head_splits:
                check_replaceable(own_head)
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


def _own(model: nn.Module, method: str) -> Any:
    """The result of a method of transformers' models; None if the model does not have it."""
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
