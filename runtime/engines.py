"""Turn a program's functions into callables: compiled by Inductor, or run operator by operator."""

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ipu_dynamo.errors import IpuError
from ipu_dynamo.program import Function
from ipu_dynamo.runtime.torch_private import cpp_compiler_names, standalone_compile

log = logging.getLogger(__name__)
Stage = Callable[[list[Tensor]], Sequence[Tensor | None]]
_compiling = threading.Lock()  # Inductor compiles one thing at a time


class Engine(Protocol):
    """Makes callables from functions; counts how many it made."""

    name: str
    compiled: int

    def compile(self, function: Function) -> Stage:
        """A callable on a list of tensors, which it may empty."""


class EagerEngine:
    """Runs a function's operators one by one: the reference for every other engine."""

    name = "eager"

    def __init__(self) -> None:
        self.compiled = 0

    def compile(self, function: Function) -> Stage:
        self.compiled += 1
        run = function.graph.forward

        def stage(arguments: list[Tensor]) -> Sequence[Tensor | None]:
            return run(*arguments)  # type: ignore[no-any-return]

        return stage


class InductorEngine:
    """Compiles a function to machine code with PyTorch's Inductor.

    Half-precision results are rounded after every operator, also inside a fused kernel, so that
    they are what the eager engine computes.
    """

    name = "inductor"

    def __init__(self) -> None:
        self.compiled = 0
        self._settings = {"emulate_precision_casts": True, "fallback_random": True}

    def compile(self, function: Function) -> Stage:
        self.compiled += 1
        examples = [
            torch.zeros(()).new_empty(0) if value is None else _example(value)
            for value in (n.meta["val"] for n in function.graph.graph.find_nodes(op="placeholder"))
        ]
        if not function.operators:
            return EagerEngine().compile(function)
        with _compiling:
            return standalone_compile(function.graph, examples, self._settings)


def make_engine(name: str) -> Engine:
    """The engine called `name`; `auto`: Inductor where a C++ compiler is found, else eager."""
    if name == "eager":
        return EagerEngine()
    if _compiler() is not None:
        return InductorEngine()
    if name == "inductor":
        raise IpuError(
            "the inductor engine needs a C++ compiler: install g++ or clang++, or "
            "choose engine='eager'"
        )
    return EagerEngine()


@cache
def _compiler() -> str | None:
    """The C++ compiler that Inductor will find; one line of log when there is none."""
    found = next((path for name in cpp_compiler_names() if (path := shutil.which(name))), None)
    if found is None:
        log.warning("no C++ compiler found: stages run on the eager engine, operator by operator")
    return found


def _example(value: Tensor) -> Tensor:
    """A real tensor with the layout of a fake one."""
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    ).zero_()
