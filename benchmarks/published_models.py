"""Models whose training or inference was measured on IPUs, on the meta device, with all layers.

Sizes and settings are those of public configurations; each model names its own. What these do not
say is an assumption, and marked as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipu_dynamo import (
    Block,
    Location,
    Locations,
    Options,
    Strategy,
    identity_loss,
    serialized_matmul,
    set_overlap_for_input,
    set_overlap_for_output,
)
from ipu_dynamo import recomputation_checkpoint as checkpoint
from ipu_dynamo.capture.trace import read_arguments
from ipu_dynamo.passes.program.emit_update import AccumulatorDtype
from ipu_dynamo.program import Program
from ipu_dynamo.program.ir.update_rules import LAMB, SGD, Rule
from ipu_dynamo.whole_step.compile_model import make_program
from ipu_dynamo.whole_step.optimizer.torch_optimizers import Group

HALF_PARTIALS = {"partials": "half", "convolution_partials": "half"}
PIPELINE = Strategy(kind="pipelined", auto_stage="auto_increment")


@dataclass(frozen=True)
class TransformerSize:
    """The sizes of a transformer.

    Args:
        layers: on each IPU.
        tokens: of a sequence.
        masked: tokens of a sequence that are predicted.
        decoder_parts: in how many parts the decoder is computed.
    """

    hidden: int
    heads: int
    layers: tuple[int, ...]
    tokens: int
    masked: int = 0
    decoder_parts: int = 1
    vocabulary: int = 30522
    dropout: float = 0.1
    attention_dropout: float = 0.0


class Attention(nn.Module):
    """Attention with one product for queries, keys and values."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.size = size
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden)
        self.out = nn.Linear(size.hidden, size.hidden)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, tokens, hidden = x.shape
        heads = self.size.heads
        qkv = self.qkv(x).view(rows, tokens, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].transpose(-1, -2) * (hidden // heads) ** -0.5
        shares = F.softmax(scores if mask is None else scores + mask, -1)
        shares = F.dropout(shares, self.size.attention_dropout)
        return self.out((shares @ qkv[2]).transpose(1, 2).reshape(rows, tokens, hidden))


class BertLayer(nn.Module):
    """A layer of BERT, whose norms follow the sums; gelu in its tanh form (assumption)."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.dropout = size.dropout
        self.attention = Attention(size)
        self.norm1, self.norm2 = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.up = nn.Linear(size.hidden, 4 * size.hidden)
        self.down = nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + F.dropout(self.attention(x, mask), self.dropout))
        y = self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.norm2(x + F.dropout(y, self.dropout))


class Bert(nn.Module):
    """BERT with both losses of its pretraining; embeddings and heads are on IPU 0.

    Source: graphcore/examples, nlp/bert/pytorch: `modeling.py`.
    """

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.size, hidden = size, size.hidden
        self.words = nn.Embedding(size.vocabulary, hidden)
        self.positions = nn.Embedding(512, hidden)
        self.kinds = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.ModuleList(BertLayer(size) for _ in range(sum(size.layers)))
        self.pooler, self.next = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)
        self.transform, self.head_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.bias = nn.Parameter(torch.zeros(size.vocabulary))

    def forward(
        self,
        ids: Tensor,
        kinds: Tensor,
        mask: Tensor,
        places: Tensor,
        words: Tensor,
        follows: Tensor,
    ) -> Tensor:
        ipus = [ipu for ipu, count in enumerate(self.size.layers) for _ in range(count)]
        with Block("embeddings", ipu_id=0):
            at = torch.arange(self.size.tokens).expand(ids.shape)
            x = self.words(ids) + self.positions(at) + self.kinds(kinds)
            x = F.dropout(self.norm(x), self.size.dropout)
            added = (1.0 - mask.to(x.dtype))[:, None, None, :] * -1e4
        for number, (layer, ipu) in enumerate(zip(self.layers, ipus, strict=True)):
            with Block(f"layer{number}", ipu_id=ipu):
                x = checkpoint(layer(x, added))
        with Block("heads", ipu_id=0):
            follow = self.next(torch.tanh(self.pooler(x[:, 0])))
            chosen = F.one_hot(places, self.size.tokens).to(x.dtype) @ x  # as in the source
            chosen = self.head_norm(F.gelu(self.transform(chosen), approximate="tanh"))
            scores = self._decoded(chosen.flatten(0, 1)) + self.bias
            of_words = F.cross_entropy(scores.float(), words.flatten())
            return identity_loss(of_words + F.cross_entropy(follow.float(), follows), "none")

    def _decoded(self, chosen: Tensor) -> Tensor:
        """The product with the embeddings, in parts of the vocabulary."""
        table, parts = self.words.weight.t(), self.size.decoder_parts
        if parts == 1:
            return chosen @ table
        return serialized_matmul(chosen, table, "output_channels", parts)

    def inputs(self, rows: int) -> tuple[Tensor, ...]:
        """The arguments for so many sequences."""
        tokens, masked = self.size.tokens, self.size.masked
        shapes = [(tokens,), (tokens,), (tokens,), (masked,), (masked,), ()]
        return tuple(torch.zeros(rows, *shape, dtype=torch.int64) for shape in shapes)


class VitLayer(nn.Module):
    """A layer of ViT, whose norms come first."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.dropout = size.dropout
        self.attention = Attention(size)
        self.norm1, self.norm2 = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.up = nn.Linear(size.hidden, 4 * size.hidden)
        self.down = nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x), None), self.dropout)
        y = F.dropout(F.gelu(self.up(self.norm2(x)), approximate="tanh"), self.dropout)
        return x + F.dropout(self.down(y), self.dropout)


class Vit(nn.Module):
    """ViT with 16 x 16 patches and a class token; 1000 classes (assumption).

    Source: graphcore/examples, vision/vit/pytorch: `configs.yml`.
    """

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.size = size
        self.patches = nn.Conv2d(3, size.hidden, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, size.hidden))
        self.positions = nn.Parameter(torch.zeros(1, size.tokens, size.hidden))
        self.layers = nn.ModuleList(VitLayer(size) for _ in range(sum(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        ipus = [ipu for ipu, count in enumerate(self.size.layers) for _ in range(count)]
        with Block("patches", ipu_id=0):
            x = self.patches(images).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            x = F.dropout(x, self.size.dropout)
        for number, (layer, ipu) in enumerate(zip(self.layers, ipus, strict=True)):
            with Block(f"layer{number}", ipu_id=ipu):
                x = checkpoint(layer(x))
        with Block("head", ipu_id=ipus[-1]):
            return F.cross_entropy(self.head(self.norm(x)[:, 0]).float(), labels)

    def inputs(self, rows: int) -> tuple[Tensor, ...]:
        """The arguments for so many images."""
        images = torch.zeros(rows, 3, 224, 224, dtype=torch.float16)
        return images, torch.zeros(rows, dtype=torch.int64)


class Bottleneck(nn.Module):
    """A block of ResNet-50; the convolution of 3 x 3 has the stride."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(channels, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, out, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, out))
        self.short: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            convolution = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.short = nn.Sequential(convolution, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for place, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            y = norm(convolution(y))
            y = F.relu(y) if place < 2 else y
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    """ResNet-50 on one IPU.

    Args:
        period: a recomputation checkpoint is behind every so many of its 16 blocks; 0: nowhere.
        overlap: images come, and classes go, while other micro-batches are computed.

    Source: graphcore/examples, vision/cnns. Batch norms; images of eight bits, scaled on the IPU.
    """

    def __init__(self, period: int = 0, *, overlap: bool = False) -> None:
        super().__init__()
        self.period, self.overlap = period, overlap
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks, channels = [], 64
        for level, count in enumerate((3, 4, 6, 3)):
            width = 64 << level
            for number in range(count):
                stride = 2 if level and not number else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(2048, 1000)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.overlap:
            images = set_overlap_for_input(images, "device_iteration_loop")
        if images.dtype == torch.uint8:
            images = images.to(torch.float16) * (1 / 64) - 2
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        for number, block in enumerate(self.blocks, 1):
            x = block(x)
            if self.period and number % self.period == 0:
                x = checkpoint(x)
        scores = self.head(x.mean((2, 3)))
        if labels is not None:
            return F.cross_entropy(scores.float(), labels)
        return set_overlap_for_output(scores, "device_iteration_loop") if self.overlap else scores

    def inputs(self, rows: int) -> tuple[Tensor, ...]:
        """The arguments for so many images."""
        images = torch.zeros(rows, 3, 224, 224, dtype=torch.uint8)
        return images, torch.zeros(rows, dtype=torch.int64)


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Args:
        model: makes it.
        micro_batch: rows.
        options: without replicas and accumulation.
    """

    model: Any
    micro_batch: int
    rule: Rule
    options: Options
    accumulator_dtype: AccumulatorDtype = None

    def program(self, *, replicas: int, accumulation: int) -> Program:
        """The program of a step."""
        options = replace(self.options, replicas=replicas, gradient_accumulation=accumulation)
        return _training_program(self, options)


def _training_program(training: Training, options: Options) -> Program:
    with torch.device("meta"):
        model = training.model().half()
        arguments = model.inputs(training.micro_batch)
    names = tuple(name for name, _ in model.named_parameters())
    values = (1.0,) * len(training.rule.hyperparameters)
    group = Group(training.rule, names, values, accumulator_dtype=training.accumulator_dtype)
    example = read_arguments(model, arguments, {})
    return make_program(model, example, options, [group], training=True)


FLOAT_STATE = LAMB(exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32)


def _transformer_options(shares: Sequence[float], *, off_chip: bool) -> Options:
    state = Location(off_chip=off_chip, sharded=True)
    return Options(
        **HALF_PARTIALS,  # type: ignore[arg-type]
        strategy=PIPELINE,
        recompute="stages",
        memory_proportion=dict(enumerate(shares)),
        locations=Locations(optimizer_state=state),
    )


BERT_LARGE = TransformerSize(1024, 16, (3, 7, 7, 7), 128, masked=20, decoder_parts=2)
BERT_LARGE_512 = replace(BERT_LARGE, tokens=512, masked=76)
BERT_BASE = TransformerSize(768, 12, (0, 4, 4, 4), 128, masked=20)
VIT_BASE = TransformerSize(768, 12, (3, 3, 3, 3), 197, attention_dropout=0.1)


def bert(size: TransformerSize, micro_batch: int, shares: Sequence[float]) -> Training:
    """The pretraining of a BERT: LAMB, whose state is off the chip and in shards."""
    options = _transformer_options(shares, off_chip=True)
    return Training(lambda: Bert(size), micro_batch, FLOAT_STATE, options, "weight")


def vit() -> Training:
    """The pretraining of ViT-B/16: LAMB, whose state is in shards; float32 accumulators."""
    options = _transformer_options((0.3,) * 4, off_chip=False)
    return Training(lambda: Vit(VIT_BASE), 8, FLOAT_STATE, options)


def resnet(period: int, share: float, *, half_partials: bool = True) -> Training:
    """The training of ResNet-50: SGD with momentum, gradients summed in float32."""
    partials = HALF_PARTIALS if half_partials else {}
    options = Options(**partials, recompute="all", memory_proportion=share)  # type: ignore[arg-type]
    return Training(lambda: ResNet(period), 20, SGD(momentum=True), options)


def resnet_inference(rows: int) -> Program:
    """ResNet-50 on one card: 64 tiles transfer while the others compute; half images.

    Source: bytedance/ByteMLPerf, IPU backend: 128 batches for each step.
    """
    with torch.device("meta"):
        model = ResNet(overlap=True).half().eval()
        images = torch.zeros(rows, 3, 224, 224, dtype=torch.float16)
    options = Options(**HALF_PARTIALS, io_tiles=64, device_iterations=128)  # type: ignore[arg-type]
    return make_program(model, read_arguments(model, (images,), {}), options, training=False)
