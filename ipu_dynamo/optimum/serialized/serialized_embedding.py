"""Look up an embedding in parts of its table, which may be on several IPUs."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from ipu_dynamo.blocks import BeginBlock, remove_blocks
from ipu_dynamo.optimum.serialized.serialized_parts import (
    EmbeddingPart,
    can_fill,
    filled,
    first_parts,
    part_sizes,
    take_rows,
)


class SerializedEmbedding(nn.Module):
    """An embedding whose table is cut into `factor` tables of equally many rows.

    Each table looks up its own indices, the others give zeros, and the results are added: the
    values and gradients are those of the whole table.

    Args:
        embedding: the whole one; its weights are copied. A frozen one stays frozen.
        serialization_factor: the number of tables, a factor of the number of rows.

    Raises:
        AssertionError: it is no factor of the number of rows.
        ValueError: an embedding that does more than looking up.

    Source: Optimum Graphcore's documentation, "SerializedEmbedding".
    """

    def __init__(self, embedding: nn.Embedding, serialization_factor: int) -> None:
        rows = embedding.num_embeddings
        if serialization_factor < 1 or rows % serialization_factor:
            raise AssertionError(
                f"a table of {rows} rows cannot be cut into {serialization_factor} equal ones"
            )
        super().__init__()
        self._cut(embedding, serialization_factor)

    def _cut(self, embedding: nn.Embedding, factor: int) -> None:
        check_plain_embedding(embedding)
        self.serialization_factor = factor
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        sizes = part_sizes(self.num_embeddings, factor)
        self.rows = sizes[0]
        self.split_embeddings = nn.ModuleList()
        for number, real in enumerate(sizes):
            begin = number * self.rows
            padding = self.padding_idx
            here = padding is not None and begin <= padding < begin + real
            table = EmbeddingPart(
                self.rows,
                self.embedding_dim,
                padding_idx=padding - begin if here and padding is not None else None,
                _weight=filled(embedding.weight, begin, real, self.rows),
            )
            table.real = real
            table.weight.requires_grad_(embedding.weight.requires_grad)
            self.split_embeddings.append(table)
        self.train(embedding.training)

    @classmethod
    def from_model(cls, embedding: nn.Embedding, serialization_factor: int) -> Self:
        """The embedding in equal parts; see the class.

        Args:
            embedding: as for the class.
            serialization_factor: as for the class.
        """
        return cls(embedding, serialization_factor)

    @classmethod
    def filled_up(cls, embedding: nn.Embedding, serialization_factor: int) -> Self:
        """The embedding in parts, the last ones filled up with zeros that no index reads.

        They are in no `state_dict`, and not in `to_model`.

        Args:
            embedding: as for the class.
            serialization_factor: the number of tables, with equally many rows each.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._cut(embedding, serialization_factor)
        return layer

    def to_model(self) -> nn.Embedding:
        """The whole embedding, with the weights of now."""
        layer = nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            padding_idx=self.padding_idx,
            _weight=self.whole_weight(),
        )
        layer.weight.requires_grad_(self._tables()[0].weight.requires_grad)
        return layer.train(self.training)

    def whole_weight(self) -> Tensor:
        """A copy of the table, [num_embeddings, embedding_dim]."""
        tables = [part.weight.detach()[: part.real] for part in self._tables()]
        return torch.cat(tables)

    def can_take(self, whole: nn.Embedding, factor: int) -> bool:
        """Whether the tables can have the weights of `whole`, cut by `factor`.

        Args:
            whole: an embedding.
            factor: the number of tables.
        """
        own = self.serialization_factor, self.num_embeddings, self.embedding_dim, self.padding_idx
        other = factor, whole.num_embeddings, whole.embedding_dim, whole.padding_idx
        return own == other and can_fill(self._tables(), whole)

    def take(self, whole: nn.Embedding) -> None:
        """Have the weights and the mode of `whole`.

        Args:
            whole: an embedding with as many rows and columns.
        """
        take_rows(self._tables(), whole)
        self.train(whole.training)

    def forward(self, indices: Tensor) -> Tensor:
        """The rows of `indices`, [..., embedding_dim].

        Args:
            indices: integers, of any shape.

        Raises:
            IndexError: as the whole table does, an index that it has not got.
        """
        total: Tensor | None = None
        tables = self._tables()
        last = max(number for number, table in enumerate(tables) if table.real)
        for number, table in enumerate(tables):
            shifted = indices - number * self.rows
            low, high = shifted < 0, shifted >= table.real
            # An index below all rows is left to the first table, one above to the last: an error.
            index = torch.where(low, 0, shifted) if number else shifted
            past_the_end = shifted + (self.rows - table.real) if number == last else 0
            found = table(torch.where(high, past_the_end, index))
            elsewhere = (low | high).unsqueeze(-1)
            own = torch.where(elsewhere, torch.zeros_like(found), found)
            total = own if total is None else total + own
        assert total is not None
        return total

    def parallelize(self, splits_per_ipu: Sequence[int]) -> Self:
        """Begin a block at the first table of each IPU that has any.

        Args:
            splits_per_ipu: tables on IPU 0, 1, ...

        Raises:
            ValueError: the numbers are not of all tables.
        """
        for ipu, table in first_parts(self._tables(), splits_per_ipu):
            BeginBlock(table, ipu_id=ipu)
        return self

    def deparallelize(self) -> Self:
        """Begin no blocks any more."""
        remove_blocks(self)
        return self

    def _tables(self) -> list[EmbeddingPart]:
        return list(self.split_embeddings)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, factor={self.serialization_factor}"


def check_plain_embedding(embedding: nn.Module) -> None:
    """Raise ValueError unless parts of a table can stand for this embedding."""
    if type(embedding) is not nn.Embedding:
        raise ValueError(
            f"a {type(embedding).__name__} may do more than look up, so parts of its table cannot "
            "stand for it: leave embedding_serialization_factor and splits out"
        )
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        raise ValueError(
            "an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be cut "
            "into parts"
        )
