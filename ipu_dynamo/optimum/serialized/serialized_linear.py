"""Compute a linear layer's product in parts: one after the other, or as layers of their own."""

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ipu_dynamo.blocks import BeginBlock, remove_blocks
from ipu_dynamo.ops.marks.serialized import MODES, serialized_matmul
from ipu_dynamo.optimum.serialized.serialized_parts import (
    LinearPart,
    can_fill,
    filled,
    first_parts,
    part_sizes,
    take_rows,
)

OUTPUT_CHANNELS, REDUCING_DIM, DISABLED = "output_channels", "reducing_dim", "none"


def mode_text(mode: Any) -> str:
    """The core's word for a mode, of which PopTorch's members have it as their value.

    Raises:
        ValueError: the mode is unknown.
    """
    text = getattr(mode, "value", mode)
    if text not in (*MODES, DISABLED):
        raise ValueError(f"there is no mode {mode!r}; choose one of {', '.join(MODES)}, {DISABLED}")
    return str(text)


class SerializedLinear(nn.Linear):
    """A linear layer whose product is computed in parts, one after the other, to save memory.

    The parameters are those of a linear layer, so its weight may be tied to an embedding. The
    values are the plain ones, up to the order of sums.

    Args:
        in_features: as for `torch.nn.Linear`.
        out_features: as for `torch.nn.Linear`.
        factor: the number of parts; where it does not divide the dimension, they are uneven.
        bias: as for `torch.nn.Linear`.
        mode: which dimension is cut: "input_channels" the rows of the input, "reducing_dim" the
            one that is summed, "output_channels" the outputs; "none" cuts nothing.

    Raises:
        ValueError: an unknown mode.

    Source: Optimum Graphcore's documentation, "SerializedLinear".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        factor: int,
        bias: bool = False,
        mode: Any = OUTPUT_CHANNELS,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.factor, self.mode = factor, mode_text(mode)

    @classmethod
    def from_model(cls, linear: nn.Linear, factor: int, mode: Any = OUTPUT_CHANNELS) -> Self:
        """A copy of a linear layer that computes in parts.

        Args:
            linear: its weights are copied.
            factor: as for the class.
            mode: as for the class.
        """
        layer: Any = copy.deepcopy(linear)
        layer.factor, layer.mode = factor, mode_text(mode)
        layer.__class__ = cls
        return layer  # type: ignore[no-any-return]

    def to_model(self) -> nn.Linear:
        """A copy that computes its product at once."""
        layer: Any = copy.deepcopy(self)
        del layer.factor, layer.mode
        layer.__class__ = nn.Linear
        return layer  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in_features] times the weight, and the bias: [..., out_features].

        Args:
            x: [..., in_features].
        """
        product = serialized_matmul(
            x,
            self.weight.t(),
            self.mode,  # type: ignore[arg-type]
            self.factor,
        )
        return product if self.bias is None else product + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, factor={self.factor}, mode={self.mode}"


class SplitProjection(nn.Module):
    """A linear layer as several, which may be on different IPUs. It has weights of its own.

    Args:
        linear: the whole one; its weights are copied.
        serialization_factor: the number of parts.
        mode: "output_channels": each has some of the outputs; "reducing_dim": each has some of the
            inputs, and results are added.

    Raises:
        ValueError: another mode, or a factor that does not divide the dimension.

    Source: Optimum Graphcore's documentation, "SplitProjection".
    """

    bias: nn.Parameter | None

    def __init__(
        self, linear: nn.Linear, serialization_factor: int, mode: Any = OUTPUT_CHANNELS
    ) -> None:
        mode = mode_text(mode)
        if mode not in (OUTPUT_CHANNELS, REDUCING_DIM):
            raise ValueError(f"a SplitProjection cannot have the mode {mode!r}")
        size = linear.out_features if mode == OUTPUT_CHANNELS else linear.in_features
        if serialization_factor < 1 or size % serialization_factor:
            raise ValueError(f"{size} {mode} cannot be cut into {serialization_factor} equal parts")
        super().__init__()
        self._cut(linear, serialization_factor, mode)

    def _cut(self, linear: nn.Linear, factor: int, mode: str) -> None:
        self.serialization_factor, self.mode = factor, mode
        self.in_features, self.out_features = linear.in_features, linear.out_features
        by_outputs = mode == OUTPUT_CHANNELS
        weight = linear.weight if by_outputs else linear.weight.t()
        sizes = part_sizes(len(weight), factor)
        self.rows = sizes[0]
        self.split_linear_layers = nn.ModuleList()
        for number, real in enumerate(sizes):
            part = filled(weight, number * self.rows, real, self.rows)
            part = part if by_outputs else part.t().contiguous()
            layer = LinearPart(part.shape[1], part.shape[0], bias=False, device="meta")
            layer.weight = nn.Parameter(part, linear.weight.requires_grad)
            layer.real = real if by_outputs else len(part)
            self.split_linear_layers.append(layer)
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)
        self.train(linear.training)

    @classmethod
    def from_model(
        cls, linear: nn.Linear, serialization_factor: int, mode: Any = OUTPUT_CHANNELS
    ) -> Self:
        """The layer in equal parts; see the class.

        Args:
            linear: as for the class.
            serialization_factor: as for the class.
            mode: as for the class.
        """
        return cls(linear, serialization_factor, mode)

    @classmethod
    def filled_up(cls, linear: nn.Linear, serialization_factor: int) -> Self:
        """The layer cut by its outputs, the last parts filled up with zeros.

        They are in no result, in no `state_dict`, and not in `to_model`.

        Args:
            linear: as for the class.
            serialization_factor: the number of parts, with equally many outputs each.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._cut(linear, serialization_factor, OUTPUT_CHANNELS)
        return layer

    def to_model(self) -> nn.Linear:
        """The whole layer, with the weights of now."""
        weight = self.whole_weight()
        layer = nn.Linear(
            self.in_features, self.out_features, bias=self.bias is not None, device="meta"
        )
        layer.weight = nn.Parameter(weight, self._layers()[0].weight.requires_grad)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return layer.train(self.training)

    def whole_weight(self) -> Tensor:
        """A copy of the weight, [out_features, in_features]."""
        parts = [part.weight.detach()[: part.real] for part in self._layers()]
        return torch.cat(parts, 0 if self.mode == OUTPUT_CHANNELS else 1)

    def can_take(self, whole: nn.Linear, factor: int) -> bool:
        """Whether the parts can have the weights of `whole`, by its outputs, cut by `factor`.

        Args:
            whole: a linear layer.
            factor: the number of parts.
        """
        own = self.serialization_factor, self.mode, self.in_features, self.out_features
        other = factor, OUTPUT_CHANNELS, whole.in_features, whole.out_features
        biased = (self.bias is None) == (whole.bias is None)
        return own == other and biased and can_fill(self._layers(), whole)

    def take(self, whole: nn.Linear) -> None:
        """Have the weights and the mode of `whole`, by its outputs.

        Args:
            whole: a linear layer of the same sizes.
        """
        take_rows(self._layers(), whole)
        if self.bias is not None:
            with torch.no_grad():
                self.bias.copy_(whole.bias)
            self.bias.requires_grad_(whole.bias.requires_grad)
        self.train(whole.training)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in_features] through all parts, and the bias: [..., out_features].

        Args:
            x: [..., in_features].
        """
        if self.mode == OUTPUT_CHANNELS:
            product = torch.cat([layer(x) for layer in self._layers()], -1)
            product = product[..., : self.out_features]
        else:
            pieces = x.split(self.rows, -1)
            results = [layer(piece) for layer, piece in zip(self._layers(), pieces, strict=True)]
            product = sum(results[1:], start=results[0])
        return product if self.bias is None else product + self.bias

    def parallelize(self, splits_per_ipu: Sequence[int]) -> Self:
        """Begin a block at the first part of each IPU that has any.

        Args:
            splits_per_ipu: parts on IPU 0, 1, ...

        Raises:
            ValueError: the numbers are not of all parts.
        """
        for ipu, layer in first_parts(self._layers(), splits_per_ipu):
            BeginBlock(layer, ipu_id=ipu)
        return self

    def deparallelize(self) -> Self:
        """Begin no blocks any more."""
        remove_blocks(self)
        return self

    def _layers(self) -> list[LinearPart]:
        return list(self.split_linear_layers)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, factor={self.serialization_factor}, "
            f"mode={self.mode}"
        )
