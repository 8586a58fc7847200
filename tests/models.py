"""Build small models that look like the ones people train, to compare doors and placements with.

Every model takes its batch as keyword arguments and returns `(loss, outputs)`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipu_dynamo import BeginBlock

Batch = dict[str, Tensor]


class WithLoss(nn.Module):
    """A Hugging Face model whose loss and logits are returned as a plain tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> tuple[Tensor, Tensor]:
        result = self.model(**batch)
        return result.loss, result.logits


def bert() -> tuple[nn.Module, Batch]:
    """BERT for sequence classification: 4 layers, padding in the batch, no dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        problem_type="single_label_classification",  # else transformers sets it at the first call
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    mask = torch.ones(4, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    batch = {
        "input_ids": torch.randint(0, 50, (4, 12)),
        "attention_mask": mask,
        "labels": torch.randint(0, 3, (4,)),
    }
    return WithLoss(model), batch


def gpt2() -> tuple[nn.Module, Batch]:
    """GPT-2 as a language model: 4 layers, output weights tied to the embedding, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=60,
        n_positions=16,
        n_embd=32,
        n_layer=4,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    # Unless told, transformers looks for a loss with a message to its log, which breaks the graph.
    model.loss_type = model.config.loss_type = "ForCausalLM"
    tokens = torch.randint(0, 60, (3, 10))
    return WithLoss(model), {"input_ids": tokens, "labels": tokens}


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.around: nn.Module = nn.Identity()
        if (inner, stride) != (outer, 1):
            self.around = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.around(x))


class ResidualNet(nn.Module):
    """A ResNet for images of 3 x 12 x 12: a stem, three residual blocks, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.blocks = nn.ModuleList([Residual(8, 8), Residual(8, 16, 2), Residual(16, 16)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h.mean((2, 3)))
        return F.cross_entropy(logits, labels), logits


def cnn() -> tuple[nn.Module, Batch]:
    """A ResNet. With this seed no input of a ReLU lies where rounding decides its sign."""
    torch.manual_seed(87)
    batch = {"x": torch.randn(6, 3, 12, 12), "labels": torch.randint(0, 5, (6,))}
    return ResidualNet(), batch


class LSTMTagger(nn.Module):
    """A classifier of sequences: embedding, two LSTMs one after the other, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.lower = nn.LSTM(12, 16, batch_first=True)
        self.upper = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h, _ = self.lower(self.embedding(tokens))
        _, (last, _) = self.upper(h)
        logits = self.head(last[-1])
        return F.cross_entropy(logits, labels), logits


def lstm() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    batch = {"tokens": torch.randint(0, 20, (5, 7)), "labels": torch.randint(0, 4, (5,))}
    return LSTMTagger(), batch


class TiedModel(nn.Module):
    """A language model whose head uses the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        logits = self.head(h)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def tied() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 24, (3, 9))
    return TiedModel(), {"tokens": tokens, "labels": tokens.roll(-1, 1)}


@dataclass(frozen=True)
class Case:
    """A model, and where it can be cut.

    Args:
        build: makes the model and its batch; the same ones every time.
        cuts: the layers that may begin stages 1, 2 and 3.
        home: the layer that begins one more stage, back on IPU 0, or None.
        rnn: holds an `nn.LSTM`, which Dynamo captures only with `torch._dynamo.config.allow_rnn`.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Batch]]
    cuts: Callable[[nn.Module], list[nn.Module]]
    home: Callable[[nn.Module], nn.Module] | None = None
    rnn: bool = False

    def place(self, model: nn.Module, ipus: int) -> int:
        """Begin blocks in `model` so that it runs on 1, 2 or 4 IPUs; return its stages."""
        layers = {1: [], 2: self.cuts(model)[1:2], 4: self.cuts(model)}[ipus]
        for ipu, layer in enumerate(layers, start=1):
            BeginBlock(layer, f"block{ipu}", ipu_id=ipu)
        if self.home is None or not layers:
            return ipus
        BeginBlock(self.home(model), "home", ipu_id=0)
        return ipus + 1


CASES = (
    Case("bert", bert, lambda m: list(m.model.bert.encoder.layer[1:4])),
    Case("gpt2", gpt2, lambda m: list(m.model.transformer.h[1:4])),
    Case("cnn", cnn, lambda m: list(m.blocks)),
    Case("lstm", lstm, lambda m: [m.lower, m.upper, m.head], rnn=True),
    Case("tied", tied, lambda m: list(m.layers[1:4]), home=lambda m: m.head),
)
