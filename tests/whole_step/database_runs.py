"""Run samples of one of PyTorch's databases, compare, count, and write down what became of each."""

import argparse
import json
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

SECONDS = 60  # of CPU time that a sample may take
Check = Callable[[], None]  # of a sample; raises where it differs, or cannot be compared


class NotInEagerError(Exception):
    """Plain PyTorch does not run a sample, or not twice with the same results."""


def tolerance(dtype: str, expected: torch.Tensor) -> dict[str, float]:
    """How near a value of a type is to be; in half precision, sums of products are rounded in units
    of the largest, by eager PyTorch more than here."""
    if dtype != "float16" or not expected.is_floating_point():
        return {}
    finite = expected.detach()[expected.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return {"rtol": 2e-2, "atol": max(2e-2, 1e-3 * largest)}


def compare(values: Any, expected: Any, dtype: str = "float32") -> None:
    """Raise unless trees of tensors have the same types, shapes and, nearly, values."""
    ours, theirs = pytree.tree_leaves(values), pytree.tree_leaves(expected)
    assert [(t.dtype, t.shape) for t in ours] == [(t.dtype, t.shape) for t in theirs]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, **tolerance(dtype, other))


def outcomes(checks: Callable[[], Iterable[Check]]) -> Iterator[tuple[str, str]]:
    """What becomes of each sample, `passed`, `failed` or `not in eager`, and why."""
    try:
        samples = list(checks())
    except Exception as error:
        yield "not in eager", _line(error)
        return
    for check in samples:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            check()
            yield "passed", ""
        except NotInEagerError as error:
            yield "not in eager", _line(error)
        except Exception as error:
            yield "failed", f"{type(error).__name__}: {_line(error)}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or traceback.format_exc()[-200:]


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main(
    description: str | None,
    dtypes: tuple[str, ...],
    names: Callable[[str], list[str]],
    checks: Callable[[str, str, int], Iterable[Check]],
) -> None:
    """Say how many samples of each entry and type pass, why others do not, and count.

    Args:
        names: of the entries that have a type.
        checks: of the first samples of an entry.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--dtypes", nargs="*", default=dtypes)
    parser.add_argument("--out", type=Path, help="a line of JSON for each entry and type")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _too_long)
    done: dict[tuple[str, str], dict[str, int]] = {}
    if arguments.out and arguments.out.exists():
        records = map(json.loads, arguments.out.read_text().splitlines())
        done = {(record["dtype"], record["name"]): record["counts"] for record in records}
    for dtype in arguments.dtypes:
        total: Counter[str] = Counter()
        for name in arguments.names or names(dtype)[:: arguments.every]:
            counts = done.get((dtype, name))
            if counts is None:
                results = list(outcomes(lambda: checks(name, dtype, arguments.samples)))  # noqa: B023
                counts = _noted(name, dtype, results, arguments.out)
            total.update(counts)
        print(dtype, dict(total), flush=True)


def _noted(
    name: str, dtype: str, results: list[tuple[str, str]], out: Path | None
) -> dict[str, int]:
    """The counts of an entry, printed and written."""
    counts = Counter(kind for kind, _ in results)
    reasons = Counter(text for kind, text in results if kind == "failed")
    for text, count in reasons.items():
        print(f"{dtype} {name}: {count} of {len(results)}: {text}", flush=True)
    if out:
        record = {"dtype": dtype, "name": name, "counts": counts, "reasons": reasons}
        with out.open("a") as file:
            print(json.dumps(record), file=file)
    return dict(counts)
