"""What a process has that a library should leave as it is, and what changes of it.

Usage: python -m tests.whole_step.process_state DOOR
Prints, as JSON, what was different after each thing that was done, beside what it was before.
"""

import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = dict[str, Any]


def state() -> State:
    """All of it, by name; entries of a dictionary are compared one by one."""
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "generator of torch": hash(torch.get_rng_state().numpy().tobytes()),
        "generator of random": hash(random.getstate()),
        "generator of numpy": hash(np.random.get_state()[1].tobytes()),
        "modes of torch": {
            "dtype": str(torch.get_default_dtype()),
            "device": str(torch.get_default_device()),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "anomaly": torch.is_anomaly_enabled(),
            "precision": torch.get_float32_matmul_precision(),
            "threads": torch.get_num_threads(),
            "warn always": torch.is_warn_always_enabled(),
        },
        "filters of warnings": [str(entry) for entry in warnings.filters],
        "hooks": {
            "showwarning": id(warnings.showwarning),
            "except": id(sys.excepthook),
            "thread": id(threading.excepthook),
            "display": id(sys.displayhook),
            "trace": str(sys.gettrace()),
            "profile": str(sys.getprofile()),
            "meta path": [id(finder) for finder in sys.meta_path],
            "stdout": id(sys.stdout),
            "stderr": id(sys.stderr),
        },
        "signal handlers": {
            str(number): str(signal.getsignal(number)) for number in signal.valid_signals()
        },
        "loggers": {
            name: _logger(name) for name in ("", "torch", *logging.root.manager.loggerDict)
        },
        "sys.path": list(sys.path),
        "environment": dict(os.environ),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "garbage collector": [gc.isenabled(), *gc.get_threshold()],
        "methods": {
            f"{owner.__name__}.{name}": id(value)
            for owner in (nn.Module, nn.Parameter, Tensor, torch, F, torch.optim.Optimizer)
            for name, value in vars(owner).items()
            if callable(value)
        },
    }


def _logger(name: str) -> list[Any]:
    logger = logging.getLogger(name)
    handlers = [type(handler).__name__ for handler in logger.handlers]
    return [logger.level, handlers, logger.propagate, logger.disabled]


def changes(before: State, after: State) -> dict[str, list[Any]]:
    """What differs, by name. What only came into being, as a logger, is no difference."""
    found: dict[str, list[Any]] = {}
    for name, was in before.items():
        now = after[name]
        if not isinstance(was, dict):
            if was != now:
                found[name] = [was, now]
            continue
        for key, value in was.items():
            if now.get(key) != value:
                found[f"{name}: {key}"] = [value, now.get(key)]
        if name in ("environment", "methods"):
            found |= {f"{name}: {key}": [None, now[key]] for key in now.keys() - was.keys()}
    return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.norm(self.layer(x)), y)


class Wrong(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return super().forward(x, y)


X, Y = torch.randn(2, 4), torch.tensor([0, 2])
NET, WRONG = Net(), Wrong()  # whose weights are drawn before anything is compared


def fails(function: Callable[..., Any], *args: Any) -> None:
    try:
        function(*args)
    except Exception:
        return
    raise AssertionError("no error")


def whole_step(package: str, step: Callable[[nn.Module], Any]) -> dict[str, Callable[[], Any]]:
    trained: list[Any] = []
    return {
        "import": lambda: __import__(package),
        "compile": lambda: trained.append(step(NET)) or trained[0].compile(X, Y),
        "call": lambda: trained[0](X, Y),
        "failed compile": lambda: fails(step(WRONG), X, Y),
        "failed call": lambda: fails(trained[0], X, torch.tensor([0, 7])),
        "call with wrong shapes": lambda: fails(trained[0], X[:, :2], Y),
        "end": lambda: getattr(trained.pop(), "destroy", bool)(),
    }


def core() -> dict[str, Callable[[], Any]]:
    def step(net: nn.Module) -> Any:
        from ipu_dynamo import compile_training

        return compile_training(net, torch.optim.SGD(net.parameters(), lr=0.1))

    return whole_step("ipu_dynamo", step)


def torch_compile() -> dict[str, Callable[[], Any]]:
    def compiled(net: nn.Module) -> Any:
        return torch.compile(net, backend="ipu", fullgraph=True)

    first = compiled(NET)
    return {
        "compile and call": lambda: first(X, Y).backward(),
        "call": lambda: first(X, Y).backward(),
        "failed compile": lambda: fails(compiled(WRONG), X, Y),
        "failed call": lambda: fails(first, X, torch.tensor([0, 7])),
    }


def poptorch() -> dict[str, Callable[[], Any]]:
    def executor(net: nn.Module) -> Any:
        import poptorch

        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
        return poptorch.trainingModel(net, optimizer=optimizer)

    return whole_step("poptorch", executor)


DOORS = {"core": core, "torch.compile": torch_compile, "poptorch": poptorch}


def main(door: str) -> None:
    found = {}
    for name, do in DOORS[door]().items():
        before = state()
        do()
        found[name] = changes(before, state())
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(sys.argv[1])
