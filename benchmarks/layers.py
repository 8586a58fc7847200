"""Hold the transformer layer that models of several cases are made of."""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """A pre-norm transformer layer, written out, on `[batch, length, width]`."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attend(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))
