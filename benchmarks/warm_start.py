"""Time the first training step of a fresh process, without and with what an earlier one compiled.

Usage: python -m benchmarks.warm_start [DOOR ...]
The time runs from the start of the process to the end of its first step, less `import torch`;
behind it are the seconds of the processor. `program_cache` stands beside a process that imports the
package and traces the model once, and says what the second process did.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

STARTED = "WARM_START_STARTED"  # environment variable: when the process was started, in seconds
FOLDER = "WARM_START_PROGRAMS"  # environment variable: where programs are kept
DOORS = ("compile_training", "torch.compile", "program_cache")
ROOT = Path(__file__).resolve().parent.parent
_PROCESSES = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")  # audit events


@dataclass(frozen=True, slots=True)
class Start:
    """A process up to the end of its first step, without `import torch`.

    Args:
        seconds: on the clock.
        cpu: seconds of the processor, of its children too.
        passes: that ran.
        processes: that it started.
    """

    seconds: float
    cpu: float
    passes: int
    processes: int


def first_steps(door: str, folder: Path, *, warm: int = 2) -> tuple[Start, Start]:
    """The first step once with empty `folder`, and the best of `warm` with full."""
    cold = fresh_process(door, folder)
    return cold, min((fresh_process(door, folder) for _ in range(warm)), key=lambda s: s.cpu)


def fresh_process(door: str, folder: Path) -> Start:
    """Start a process that makes its first step, or traces the model only ("trace")."""
    environment = os.environ | {
        "IPU_DYNAMO_CACHE_DIR": str(folder / "stages"),
        "IPU_DYNAMO_ENGINE": "inductor",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONPATH": str(ROOT),
        FOLDER: str(folder / "programs"),
        STARTED: repr(time.time()),
    }
    command = [sys.executable, "-m", "benchmarks.warm_start", "--in-this-process", door]
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    run.check_returncode()
    return Start(**json.loads(run.stdout.splitlines()[-1]))


def _in_this_process(door: str) -> None:
    """Make the first step, and print what it took since the process was started."""
    processes: list[str] = []
    sys.addaudithook(lambda event, _: processes.append(event) if event in _PROCESSES else None)
    before, cpu = time.perf_counter(), time.process_time()
    import torch

    importing, cpu_of_import = time.perf_counter() - before, time.process_time() - cpu
    passes = _count_passes()
    if door == "trace":
        _end_after_tracing()
    step = _step(door)
    with contextlib.suppress(_TracedError):
        assert torch.isfinite(step(torch.randint(256, (4, 32))))
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    start = Start(
        seconds=time.time() - float(os.environ[STARTED]) - importing,
        cpu=sum(use.ru_utime + use.ru_stime for use in spent) - cpu_of_import,
        passes=len(passes),
        processes=len(processes),
    )
    print(json.dumps({name: getattr(start, name) for name in Start.__slots__}))


class _TracedError(Exception):
    """The model is traced."""


def _end_after_tracing() -> None:
    """Let a compilation end when its model is traced."""
    from ipu_dynamo.whole_step import compile_model

    trace = compile_model.trace

    def only(*args, **kwargs):  # type: ignore[no-untyped-def]
        trace(*args, **kwargs)
        raise _TracedError

    compile_model.trace = only  # type: ignore[attr-defined]


def _count_passes() -> list[str]:
    """Names of the passes that run from now on."""
    from ipu_dynamo.passes.manager import PassManager

    run, names = PassManager.run, []

    def counted(self, passes, level):  # type: ignore[no-untyped-def]
        names.extend(step.name for step in passes)
        return run(self, passes, level)

    PassManager.run = counted  # type: ignore[method-assign]
    return names


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
    if door in ("compile_training", "program_cache", "trace"):
        kept = {} if door == "compile_training" else {"program_cache": os.environ[FOLDER]}
        return ipu_dynamo.compile_training(model, optimizer, kept)
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
            traced = fresh_process("trace", Path(folder)) if door == "program_cache" else None
        print(
            f"{door:<17} cold {cold.seconds:6.1f} s ({cold.cpu:.1f} s)   "
            f"warm {warm.seconds:5.1f} s ({warm.cpu:.2f} s)   "
            f"{cold.seconds / warm.seconds:4.1f} times"
        )
        if traced is not None:
            print(
                f"{'':<17} {warm.cpu / traced.cpu:.2f} times a process that imports and traces "
                f"({traced.cpu:.2f} s); {warm.passes} passes, {warm.processes} processes started"
            )


if __name__ == "__main__":
    main()
