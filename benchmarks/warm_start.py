"""Time the first training step of a fresh process, without and with what an earlier one compiled.

Usage: python -m benchmarks.warm_start [DOOR ...]
The time runs from the start of the process to the end of its first step, less `import torch`.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STARTED = "WARM_START_STARTED"  # environment variable: when the process was started, in seconds
DOORS = ("compile_training", "torch.compile")
ROOT = Path(__file__).resolve().parent.parent


def first_steps(door: str, folder: Path, *, warm: int = 2) -> tuple[float, float]:
    """Seconds that the first step takes: once with empty `folder`, best of `warm` with full."""
    cold = _fresh_process(door, folder)
    return cold, min(_fresh_process(door, folder) for _ in range(warm))


def _fresh_process(door: str, folder: Path) -> float:
    environment = os.environ | {
        "IPU_DYNAMO_CACHE_DIR": str(folder / "stages"),
        "IPU_DYNAMO_ENGINE": "inductor",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONPATH": str(ROOT),
        STARTED: repr(time.time()),
    }
    command = [sys.executable, "-m", "benchmarks.warm_start", "--in-this-process", door]
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    run.check_returncode()
    return float(run.stdout.splitlines()[-1])


def _in_this_process(door: str) -> None:
    """Make the first step, and print how long it took since the process was started."""
    before = time.perf_counter()
    import torch

    importing = time.perf_counter() - before
    step = _step(door)
    loss = step(torch.randint(256, (4, 32)))
    assert torch.isfinite(loss)
    print(time.time() - float(os.environ[STARTED]) - importing)


def _step(door: str):  # type: ignore[no-untyped-def]
    """A training step of a small decoder of the GPT-2 kind."""
    import torch
    from torch import nn

    import ipu_dynamo
    from ipu_dynamo.torch_compile.backend import ipu

    class Layer(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(h.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    class Decoder(nn.Module):
        def __init__(self, words: int = 256, width: int = 64, layers: int = 2) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Embedding(32, width)
            self.layers = nn.ModuleList(Layer(width, heads=4) for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens) + self.places.weight
            for layer in self.layers:
                x = layer(x)
            guesses = self.head(self.norm(x))[:, :-1]
            return nn.functional.cross_entropy(guesses.flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    if door == "compile_training":
        return ipu_dynamo.compile_training(model, optimizer)
    compiled = torch.compile(model, backend=ipu, fullgraph=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = compiled(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    """Print the times for the doors named on the command line, or all."""
    if sys.argv[1:2] == ["--in-this-process"]:
        return _in_this_process(sys.argv[2])
    for door in sys.argv[1:] or DOORS:
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = first_steps(door, Path(folder))
        print(f"{door:<17} cold {cold:6.1f} s   warm {warm:5.1f} s   {cold / warm:4.1f} times")


if __name__ == "__main__":
    main()
