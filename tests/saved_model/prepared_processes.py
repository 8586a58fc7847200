"""Run functions in new processes that have imported what they need when they begin.

The imports are nearly all that such a process does; one does them, and forks the others.
"""

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from ipu_dynamo.saved_model import load

MODULES = [
    "ipu_dynamo.saved_model.command.main",
    "tests.saved_model.conversion.killed_conversions",
    "tests.saved_model.conversion.slow_conversions",
    "tests.saved_model.test_gate",
    "tests.saved_model.test_hostile_conversions",
    "tests.saved_model.test_hostile_inputs",
]


def prepared() -> ForkServerContext:
    """What makes such processes; until it is asked for, other tests get a server without them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context


def run(function: Callable[..., Any], *arguments: Any, output: Path, seconds: float = 300) -> int:
    """Run a function of a module, and return the exit status of its process.

    Args:
        output: gets what the process prints; its errors go to the same name with `.err` behind it.

    Raises:
        TimeoutError: it does not end in time.
    """
    process = prepared().Process(target=_written, args=(function, arguments, output))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{function.__name__} does not end in {seconds} s")
    return process.exitcode


def errors_of(output: Path) -> str:
    """What a process has written to its standard error."""
    return output.with_name(f"{output.name}.err").read_text()


def run_loaded(folder: Path, inputs: Path, result: Path) -> None:
    """Call what is saved in `folder` with the tensors of a file, and write what it returns."""
    values = torch.load(inputs, weights_only=True)
    torch.save({**load(folder)["serving_default"](**values)}, result)
    assert "transformers" not in sys.modules


def run_command(arguments: list[str]) -> None:
    """Be `python -W error -m ipu_dynamo.saved_model`, whose imports are done."""
    warnings.simplefilter("error")
    sys.argv[1:] = arguments
    runpy.run_module("ipu_dynamo.saved_model", run_name="__main__", alter_sys=True)


def _written(function: Callable[..., Any], arguments: tuple[Any, ...], output: Path) -> None:
    for number, name in ((1, output), (2, f"{output}.err")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    function(*arguments)
