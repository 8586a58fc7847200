"""Compile PyTorch's operator database with Inductor, in programs of many samples each.

A program that fails is cut in halves, until it is known which samples do not compile or compute
something else. At the end stands which operators of the programs ran without code of their own:
in functions that run operator by operator, or because Inductor calls PyTorch for them.

Usage: python -m tests.whole_step.operator_batches [NAME ...]
       [--samples N] [--every N] [--dtype D] [--size N] [--engine E]
"""

import argparse
import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch._inductor import lowering

import ipu_dynamo
from ipu_dynamo.program.recipe import FunctionRecipe
from tests.operator_lists import (
    FAILURES_TRAINING,
    OUTSIDE_TRAINING,
    RANDOM_BEGINNINGS,
    by_name,
)
from tests.whole_step.database_runs import NotInEagerError
from tests.whole_step.operator_database import (
    OPERATORS,
    Scaled,
    check_model,
    names_with,
    plain_step,
    samples,
)

LEFT_OUT = {*by_name((*OUTSIDE_TRAINING, *FAILURES_TRAINING)), *RANDOM_BEGINNINGS}


class Several(nn.Module):
    """Several operators, whose losses are added."""

    def __init__(self, models: Sequence[Scaled]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.tensors = [tensor for model in models for tensor in model.tensors]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        rest, total, results = iter(tensors), torch.zeros(()), list[Tensor]()
        for model in self.models:
            loss, found = model.computed(*[next(rest) for _ in model.tensors])
            total, results = total + loss, results + found
        return ipu_dynamo.identity_loss(total, "none"), results


def compared(names: Sequence[str], dtype: str, count: int) -> Iterator[tuple[str, Scaled]]:
    """Samples that plain PyTorch runs, twice with the same results."""
    for name in names:
        try:
            models = [Scaled(OPERATORS[name], sample) for sample in samples(name, dtype, count)]
        except Exception:  # the database makes none
            continue
        for model in models:
            try:
                plain_step(copy.deepcopy(model))
            except NotInEagerError:
                continue
            yield name, model


def failures(
    batch: Sequence[tuple[str, Scaled]], dtype: str, engine: str, ran: "Counter[tuple[str, str]]"
) -> Iterator[tuple[str, str]]:
    """The samples of a program that fail, and why.

    Args:
        ran: counts the operators of those that pass, and how they ran.
    """
    try:
        step = check_model(Several([copy.deepcopy(model) for _, model in batch]), dtype, engine)
        ran.update(how_ran(step.executable.host_program.recipes.values()))
    except Exception as error:
        if len(batch) == 1:
            text = " ".join(str(error).split())[:200]
            yield batch[0][0], f"{type(error).__name__}: {text}"
            return
        middle = len(batch) // 2
        yield from chain(
            failures(batch[:middle], dtype, engine, ran),
            failures(batch[middle:], dtype, engine, ran),
        )


def how_ran(recipes: Iterable[FunctionRecipe]) -> Iterator[tuple[str, str]]:
    """How each operator of functions runs here, and its name."""
    for recipe in recipes:
        if recipe.parts is not None:
            yield from how_ran(part.recipe for part in recipe.parts.parts)
            continue
        for node in recipe.lowered.operators:
            called = node.target in lowering.fallbacks
            ways = {"eager": "operator by operator", "inductor": "called by Inductor"}
            way = ways[recipe.engine] if called or recipe.engine == "eager" else "compiled"
            yield way, str(node.target)
        yield from how_ran(recipe.bodies)


def main() -> None:
    """Print what fails, and count samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", type=int, default=50)
    parser.add_argument("--engine", default="inductor")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    names = arguments.names or names_with(arguments.dtype)[:: arguments.every]
    pairs = compared([n for n in names if n not in LEFT_OUT], arguments.dtype, arguments.samples)
    counts: Counter[str] = Counter()
    ran: Counter[tuple[str, str]] = Counter()
    while batch := list(islice(pairs, arguments.size)):
        failed = list(failures(batch, arguments.dtype, arguments.engine, ran))
        for name, text in failed:
            print(f"{arguments.dtype} {name}: {text}", flush=True)
        counts += Counter(passed=len(batch) - len(failed), failed=len(failed))
        print(f"{dict(counts)}", flush=True)
    for way in sorted({way for way, _ in ran}):
        of = sorted(name for other, name in ran if other == way)
        print(f"{way}: {len(of)} operators" + ("" if way == "compiled" else f": {' '.join(of)}"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
