"""Train with every optimiser class of installed packages, traced and eagerly, and compare.

    python -m tests.whole_step.optimizer_classes pytorch_optimizer timm.optim --out report.jsonl

A class counts if it can be constructed without advice and steps eagerly. Parameters are fed equal
gradients, which hang on nothing but the data, over several steps with another learning rate each.
"""

import argparse
import copy
import importlib
import inspect
import json
import pkgutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ipu_dynamo import CompileError, compile_training, identity_loss

STEPS = 7
SECONDS = 120
EXACT = 1e-6  # of the largest weight
SHAPES = ((4, 3), (4,), (2, 4))


class Fed(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(s, generator=generator) for s in SHAPES)

    def forward(self, *gradients: Tensor) -> Tensor:
        products = [(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]
        return identity_loss(torch.stack(products), "sum")


class Outcome(NamedTuple):
    """What became of a class.

    Args:
        kind: `exact`, `close`, `wrong`, `refused`, `error`; `eager`: it does not run eagerly.
        text: the difference, or the first line of the error.
    """

    name: str
    kind: str
    text: str


Make = Callable[[list[nn.Parameter]], Optimizer]


def classes(module: str) -> Iterator[type[Optimizer]]:
    """The optimisers that a package defines."""
    package = importlib.import_module(module)
    modules = [package]
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), f"{module}."):
        try:
            modules.append(importlib.import_module(found.name))
        except (Exception, SystemExit) as error:  # a part that needs another package
            print(f"{found.name} is left out: {error}", file=sys.stderr)
    known: dict[str, type[Optimizer]] = {}
    for part in modules:
        for _, kind in inspect.getmembers(part, inspect.isclass):
            own = kind.__module__.split(".")[0] == module.split(".")[0]
            if issubclass(kind, Optimizer) and kind is not Optimizer and own:
                known.setdefault(f"{kind.__module__}.{kind.__qualname__}", kind)
    yield from known.values()


def makers(kind: Any) -> Iterator[Make]:
    """Ways of constructing a class."""
    yield lambda params: kind(params, lr=1e-2)
    yield lambda params: kind(params)
    yield lambda params: kind(torch.optim.AdamW(params, lr=1e-2))
    yield lambda params: kind([{"params": params, "use_muon": True}], lr=1e-2)


def batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(s, generator=generator) for s in SHAPES] for _ in range(STEPS)]


def begin(optimizer: Any) -> None:
    """Go to the training mode of optimisers that have one."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()


def next_rate(optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] = 1e-2 * (1 + step % 3)


def eagerly(make: Make) -> Fed:
    model = Fed()
    optimizer = make(list(model.weights))
    begin(optimizer)
    torch.manual_seed(2)
    for step, gradients in enumerate(batches()):
        next_rate(optimizer, step)
        optimizer.zero_grad()
        model(*gradients).backward()
        optimizer.step()
    return model


def traced(make: Make) -> Fed:
    model = Fed()
    optimizer = make(list(model.weights))
    begin(optimizer)
    run = compile_training(model, optimizer, {"engine": "eager"})
    torch.manual_seed(2)
    for step, gradients in enumerate(batches()):
        next_rate(optimizer, step)
        run(*copy.deepcopy(gradients))
    return model


def outcome(kind: type[Optimizer]) -> Outcome:
    """Run a class both ways."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    failures = []
    for make in makers(kind):
        try:
            expected = eagerly(make)
        except Exception as error:
            failures.append(_line(error))
            continue
        if not any(map(torch.any, map(torch.sub, expected.weights, Fed().weights))):
            failures.append("it changes no weight")
            continue
        try:
            model = traced(make)
        except CompileError as error:
            return Outcome(name, "refused", _line(error))
        except Exception as error:
            return Outcome(name, "error", f"{type(error).__name__}: {_line(error)}")
        pairs = list(zip(model.weights, expected.weights, strict=True))
        scale = max(float(own.abs().max()) for _, own in pairs)
        apart = max(float((mine - own).abs().max()) for mine, own in pairs) / scale
        near = "close" if apart <= 1e-3 else "wrong"
        return Outcome(name, "exact" if apart <= EXACT else near, f"{apart:.1e}")
    return Outcome(name, "eager", failures[0])


def _line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:2])


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--out", type=Path, help="a line of JSON for each class")
    parser.add_argument("--only", default="", help="classes whose name has this")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _too_long)
    counts: Counter[str] = Counter()
    lines = []
    for package in arguments.packages:
        for kind in classes(package):
            if arguments.only not in kind.__qualname__:
                continue
            signal.alarm(SECONDS)
            try:
                made = outcome(kind)
            except TimeoutError as error:
                made = Outcome(kind.__qualname__, "error", str(error))
            finally:
                signal.alarm(0)
            counts[made.kind] += 1
            lines.append(json.dumps(made._asdict()))
            print(f"{made.kind:8} {made.name}  {made.text}", flush=True)
            if arguments.out:
                arguments.out.write_text("\n".join(lines) + "\n")
    print(dict(counts))


if __name__ == "__main__":
    main()
