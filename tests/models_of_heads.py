"""Hold the head of a language model, in the forms that the tests of serialised products need."""

import torch
from torch import nn
from torch.nn import functional as F

from ipu_dynamo import serialized_matmul


class Head(nn.Module):
    """Tokens in; a product with the embedding's matrix, and its cross-entropy, out.

    Args:
        mode, factor, keep_precision: of the serialised product.
        reduction, ignore_index: of the loss.
        tied: the product's matrix is the embedding's.
        padding: the embedding's index without a gradient.
        logits: return them too.
    """

    def __init__(
        self,
        mode="none",
        factor=1,
        *,
        classes=12,
        width=4,
        reduction="mean",
        ignore_index=-100,
        keep_precision=False,
        tied=True,
        padding=None,
        logits=False,
    ):
        super().__init__()
        self.mode, self.factor, self.keep_precision = mode, factor, keep_precision
        self.reduction, self.ignore_index, self.logits = reduction, ignore_index, logits
        self.embedding = nn.Embedding(classes, width, padding_idx=padding)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, classes, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, targets):
        h = torch.tanh(self.layer(self.embedding(tokens)))
        weight = self.head.weight.t()
        logits = serialized_matmul(h, weight, self.mode, self.factor, self.keep_precision)
        loss = F.cross_entropy(
            logits.flatten(0, -2),
            targets.flatten(),
            reduction=self.reduction,
            ignore_index=self.ignore_index,
        )
        return (loss, logits) if self.logits else loss
