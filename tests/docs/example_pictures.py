"""Run the examples as users do, for the pictures and figures of their pages."""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from typing import Any

from benchmarks.provenance import provenance
from examples import digits, gpt, huggingface_bert, predict_a_model
from ipu_dynamo.report.views.memory_view import category_names, ipu_bars

Json = Any


@contextlib.contextmanager
def _as_users() -> Iterator[None]:
    """Run with the default engine, in a folder of its own, and print nothing."""
    engine, before = os.environ.pop("IPU_DYNAMO_ENGINE", None), os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            if engine is not None:
                os.environ["IPU_DYNAMO_ENGINE"] = engine


def _of_example(main: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The figures of an example, and where they were measured."""
    with _as_users():
        figures = main()
    machine = provenance()
    busy = ", while other programs ran" if os.getloadavg()[0] > 1.5 * machine["cores"] else ""
    where = (
        f"{datetime.now(UTC):%Y-%m-%d}, {machine['cpu']}, {machine['cores']} cores, "
        f"PyTorch {machine['torch']}{busy}"
    )
    return figures, {"measured": where}


def digits_data() -> Json:
    """Losses and predictions of `examples/digits.py`."""
    figures, measured = _of_example(lambda: digits.main(epochs=12))
    losses = {"four IPUs": figures["losses"]["ipu_dynamo"]}
    losses["plain PyTorch"] = figures["losses"]["eager"]
    measured["held-back digits that are right"] = f"{figures['accuracy']:.2%}"
    measured["predictions that plain PyTorch makes too"] = f"{figures['agreement']:.2%}"
    apart = f"{figures['difference_after_10_updates']:.0e} of the largest value"
    measured["weights after 10 updates, at most apart from plain PyTorch's"] = apart
    return {"x": "epoch", "losses": losses, "measured": measured}


def bert_data() -> Json:
    """Losses of `examples/huggingface_bert.py`."""
    figures, measured = _of_example(huggingface_bert.main)
    measured["losses, at most apart from plain PyTorch's"] = f"{figures['difference']:.0e}"
    return {"x": "update", "losses": figures["losses"], "measured": measured}


def keras_data() -> Json:
    """Losses and predictions of `examples/keras_digits.py`."""
    from examples import keras_digits  # it chooses what Keras imports

    figures, measured = _of_example(lambda: keras_digits.main(epochs=10))
    measured["held-back digits that are right"] = f"{figures['accuracy']:.2%}"
    measured["predictions that plain Keras makes too"] = f"{figures['agreement']:.2%}"
    return {"x": "epoch", "losses": figures["losses"], "measured": measured}


def gpt_data() -> Json:
    """Losses and memory of `examples/gpt.py`."""
    figures, measured = _of_example(gpt.main)
    measured["losses of the first 20 updates, at most apart"] = f"{figures['difference']:.0e}"
    predicted = {
        "kept for backward passes on IPUs, values computed again": _kib(
            figures["recomputed_bytes"]
        ),
        "kept for backward passes on IPUs, all values kept": _kib(figures["kept_bytes"]),
    }
    return {
        "x": "update",
        "losses": figures["losses"],
        "predicted": predicted,
        "measured": measured,
    }


@cache
def _predicted() -> tuple[dict[str, Any], dict[str, str]]:
    return _of_example(predict_a_model.main)


def choices_data() -> Json:
    """Memory and time of the choices of `examples/predict_a_model.py`."""
    series: dict[str, list[Any]] = {}
    choices = _predicted()[0]["choices"]
    for (rows, recompute), of in choices.items():
        name = {"off": "values kept", "all": "values computed again"}[recompute]
        label = f"{rows} row{'s' * (rows > 1)}"
        point = [round(1e3 * of.step_seconds, 1), round(of.verdict.tile.central / 2**10), label]
        series.setdefault(name, []).append(point)
    limit = next(iter(choices.values())).verdict.limit // 2**10
    axes = ["predicted time of an update, ms", "fullest tile, KiB"]
    return {"series": series, "limit": limit, "axes": axes}


def predict_data() -> Json:
    """The choices of `examples/predict_a_model.py`, and the memory of the best."""
    figures, measured = _predicted()
    best = figures["best"]
    predicted = {
        f"micro-batches of {rows} rows, recompute {recompute}": (
            f"{of.verdict.word}; {of.items_per_second:,.0f} rows a second"
        )
        for (rows, recompute), of in figures["choices"].items()
    }
    here = f"{figures['rows_per_second_here']:.2f} rows a second"
    measured["plain PyTorch on this computer, a quarter of the layers"] = here
    return {
        "categories": category_names(best),
        "ipus": ipu_bars(best),
        "predicted": predicted,
        "measured": measured,
    }


def _kib(nbytes: int) -> str:
    return f"{nbytes / 2**10:,.0f} KiB"
