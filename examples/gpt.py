"""Train a character GPT on four virtual IPUs, as a pipeline that computes activations again.

The text comes with Python: the Zen of Python, of the module `this`. The same training runs in plain
PyTorch on the same batches, to compare losses, weights and speed. Then the model recites the text.
"""

import argparse
import codecs
import contextlib
import copy
import importlib
import io
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ipu_dynamo
from ipu_dynamo import BeginBlock, Options, Strategy

MICRO_BATCH, ACCUMULATION = 4, 8  # rows of a micro-batch, micro-batches of an update
LEARNING_RATE = 2e-3
PROMPT = "Beautiful is"
Batch = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """A layer of a transformer that reads what was before. Input: `[batch, length, width]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.inputs(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        mixed = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.outputs(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT whose layers are shared out over IPUs, the first of which has the embeddings, too.

    Input: tokens `[batch, length]`, and the next ones when training. It returns the loss then, and
    scores `[batch, length, words]` otherwise.
    """

    def __init__(
        self, words: int, *, width: int, layers: int, heads: int, length: int, ipus: int
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        for ipu in range(1, ipus):
            BeginBlock(self.layers[ipu * layers // ipus], ipu_id=ipu)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        if targets is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def zen() -> str:
    """The text of the module `this`, which prints itself when it is imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        this: Any = importlib.import_module("this")
    return codecs.decode(this.s, "rot13")


def batches(text: Tensor, count: int, length: int) -> list[Batch]:
    """Pieces of a text, and the same pieces one character later: `[rows, length]` each."""
    drawn = torch.Generator().manual_seed(1)
    rows = MICRO_BATCH * ACCUMULATION
    places = torch.arange(length)
    starts = torch.randint(0, len(text) - length, (count, rows, 1), generator=drawn)
    return [(text[of + places], text[of + places + 1]) for of in starts]


def options(**more: Any) -> Options:
    """A pipeline in which stages keep their inputs only, and compute the rest again.

    That is for the memory of IPUs: this computer keeps the values if it has room for them.
    """
    return Options(
        strategy=Strategy(kind="pipelined"),
        gradient_accumulation=ACCUMULATION,
        output_mode="all",
        recompute_here=False,
        **{"recompute": "all", **more},
    )


def trained(model: nn.Module, data: Sequence[Batch]) -> tuple[list[float], float, Any]:
    """The loss of each update on virtual IPUs, the seconds of one, and the compiled step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = ipu_dynamo.compile_training(model, optimizer, options())
    step.compile(*data[0])
    begin = time.perf_counter()
    losses = [float(step(*batch).mean()) for batch in data]
    seconds = (time.perf_counter() - begin) / len(data)
    step.read_weights()
    return losses, seconds, step


def trained_in_pytorch(model: nn.Module, data: Sequence[Batch]) -> tuple[list[float], float]:
    """The same in a loop of plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, begin = [], time.perf_counter()
    for tokens, targets in data:
        optimizer.zero_grad()
        parts = zip(tokens.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True)
        of_parts = []
        for part in parts:
            loss = model(*part)
            (loss / ACCUMULATION).backward()
            of_parts.append(float(loss.detach()))
        optimizer.step()
        losses.append(sum(of_parts) / ACCUMULATION)
    return losses, (time.perf_counter() - begin) / len(data)


@torch.no_grad()
def recited(model: nn.Module, letters: str, count: int, length: int) -> str:
    """What the model writes after the prompt, always the likeliest character."""
    tokens = [letters.index(letter) for letter in PROMPT]
    for _ in range(count):
        scores = model(torch.tensor([tokens[-length:]]))
        tokens.append(int(scores[0, -1].argmax()))
    return "".join(letters[token] for token in tokens)


def stashed(model: nn.Module, batch: Batch, recompute: str) -> int:
    """The predicted bytes that all IPUs keep of micro-batches for their backward passes."""
    prediction = ipu_dynamo.predict(
        model,
        *(part[:MICRO_BATCH] for part in batch),
        optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        options=options(recompute=recompute),
    )
    return sum(
        category.nbytes.central
        for ipu in prediction.ipus
        for category in ipu.memory.categories
        if category.name == "stash and stream buffers"
    )


def main(steps: int = 200, width: int = 64, length: int = 64) -> dict[str, Any]:
    """Train twice, compare, print; return the printed figures and both lists of losses."""
    torch.manual_seed(0)
    text = zen()
    letters = "".join(sorted(set(text)))
    data = batches(torch.tensor([letters.index(c) for c in text]), steps, length)
    model = GPT(len(letters), width=width, layers=4, heads=4, length=length, ipus=4)
    plain = copy.deepcopy(model)
    kept, again = (stashed(model, data[0], recompute) for recompute in ("off", "all"))
    ours, seconds, step = trained(model, data)
    print(step.program.short())
    theirs, plain_seconds = trained_in_pytorch(plain, data)
    print(recited(model, letters, 200, length))
    figures = {
        "first": ours[0],
        "last": ours[-1],
        "difference": max(abs(a - b) for a, b in zip(ours[:20], theirs[:20], strict=True)),
        "seconds": seconds,
        "plain_seconds": plain_seconds,
        "kept_bytes": kept,
        "recomputed_bytes": again,
    }
    print(f"loss {ours[0]:.2f} -> {ours[-1]:.3f}, in plain PyTorch {theirs[-1]:.3f}")
    print(f"losses of the first 20 updates differ by {figures['difference']:.1e} at most")
    print(f"an update takes {1e3 * seconds:.0f} ms, in plain PyTorch {1e3 * plain_seconds:.0f} ms")
    print(f"IPUs keep {again / 2**10:,.0f} KiB of values for backward passes,")
    print(f"and without recomputation {kept / 2**10:,.0f} KiB")
    return figures | {"losses": {"four IPUs": ours, "plain PyTorch": theirs}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
