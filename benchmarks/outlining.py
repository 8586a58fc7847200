"""Measure what outlining saves: the time to the first training step of 6 and of 48 equal layers.

Usage: python -m benchmarks.outlining [--layers N ...] [--repetitions N] [--steady] [--json FILE]

Each contender makes its first step in a process of its own, with empty caches; `import torch` is
not counted. Both compile forward, backward and the optimiser (AdamW). With --steady the later steps
are timed instead, of programs with and without outlining, in turn in one process. CPU time is that
of the process and of the compilers that it waits for.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WIDTH, LENGTH, BATCH, HEADS = 256, 64, 4, 8
CONTENDERS = ("compile_training", "not outlined", "torch.compile")
ROOT = Path(__file__).resolve().parent.parent


def first_step(who: str, layers: int) -> dict[str, float]:
    """Wall and CPU seconds of the first step, in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "IPU_DYNAMO_CACHE_DIR": f"{folder}/stages",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compilers are waited for, and counted
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "benchmarks.outlining", "--one", who]
        command += ["--layers", str(layers)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _in_this_process(who: str, layers: int) -> dict[str, float]:
    import torch  # not counted

    torch.manual_seed(0)
    wall, cpu = time.perf_counter(), _cpu_seconds()
    loss = make_step(who, layers)()
    seconds = {"wall": time.perf_counter() - wall, "cpu": _cpu_seconds() - cpu}
    return seconds | {"loss": float(loss)}  # type: ignore[arg-type]


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def make_step(who: str, layers: int) -> Callable[[], object]:
    """A training step of an encoder with `layers` equal layers."""
    import torch
    from torch import nn

    import ipu_dynamo
    from benchmarks.layers import Layer

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(Layer(WIDTH, HEADS) for _ in range(layers))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return nn.functional.mse_loss(self.last(x), y)

    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-4))
    x, y = torch.randn(2, BATCH, LENGTH, WIDTH).unbind()
    if who == "torch.compile":
        compiled, update = torch.compile(model), torch.compile(optimizer.step)

        def step() -> torch.Tensor:
            loss = compiled(x, y)
            loss.backward()
            update()
            optimizer.zero_grad()
            return loss.detach()  # type: ignore[no-any-return]

        return step
    outline = False if who == "not outlined" else "auto"
    options = {"engine": "inductor", "outline": outline}
    trained = ipu_dynamo.compile_training(model, optimizer, options)
    return lambda: trained(x, y)


def steady(layers: int, rounds: int) -> dict[str, float]:
    """CPU seconds of a step with and without outlining: medians, and the median of the ratios."""
    steps = {who: make_step(who, layers) for who in CONTENDERS[:2]}
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    for round_number in range(rounds + 3):
        for who, step in steps.items():
            start = time.process_time()
            step()
            if round_number >= 3:
                seconds[who].append(time.process_time() - start)
    on, off = seconds.values()
    ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
    return {who: statistics.median(of) for who, of in seconds.items()} | {"ratio": ratio}


def main() -> None:
    """Print the times, or those of one contender as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outlining")
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 48])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--repetitions", type=int, default=1, help="processes, or rounds of steps")
    parser.add_argument("--steady", action="store_true", help="time later steps")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_in_this_process(arguments.one, *arguments.layers)))
        return
    figures: dict[str, object] = {}
    for layers in arguments.layers:
        if arguments.steady:
            found = steady(layers, max(arguments.repetitions, 5))
            figures[f"steady, {layers} layers"] = found
            both = ", ".join(f"{who} {1e3 * found[who]:.1f} ms" for who in CONTENDERS[:2])
            print(f"{layers} layers, a step: {both}, ratio {found['ratio']:.3f}")
            continue
        for who in arguments.contenders:
            runs = [first_step(who, layers) for _ in range(arguments.repetitions)]
            best = {key: min(run[key] for run in runs) for key in runs[0]}
            figures[f"{who}, {layers} layers"] = best
            print(
                f"{layers} layers, first step of {who:<17} {best['wall']:7.1f} s, CPU "
                f"{best['cpu']:7.1f} s   loss {best['loss']:.6f}",
                flush=True,
            )
    if arguments.json:
        from benchmarks.provenance import provenance

        arguments.json.write_text(json.dumps({**provenance(), "outlining": figures}, indent=1))


if __name__ == "__main__":
    main()
