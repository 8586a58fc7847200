"""Run configurations in one checkout, as told line by line on standard input; answer in JSON.

A line is `run NAME` or `time`, which times the configuration that ran last.
"""

import gc
import itertools
import json
import os
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from .configurations import THREADED, Configuration, configurations
from .fronts import Running, make
from .graphs import Recorder
from .memory import peak_bytes

STEPS = 3
_BURSTS, _BURST_SECONDS = 5, 0.004


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    _check_checkout(Path(sys.argv[1]))
    known = {c.name: c for c in configurations(quick=False)}
    recorder, running, burst = Recorder(), None, 0
    gc.freeze()  # what is imported needs no look at every collection
    for line in sys.stdin:
        what, _, name = line.strip().partition(" ")
        if what == "run":
            running = None
            gc.collect()
            running, answer = _run(known[name], recorder)
            burst = 0
        else:
            if running is None:
                raise SystemExit("nothing is there to time: the last configuration has failed")
            burst = burst or max(1, round(_BURST_SECONDS / _seconds(running, 4)))
            answer = {"seconds": [_seconds(running, burst) for _ in range(_BURSTS)]}
        print(json.dumps(answer), file=answers, flush=True)


def _run(configuration: Configuration, recorder: Recorder) -> tuple[Running | None, dict[str, Any]]:
    recorder.clear()
    known = set(recorder.texts)
    start = time.perf_counter()
    try:
        running, bits, peak = _train(configuration)
    except Exception as error:  # both checkouts are to go on with the next one
        return None, {"error": f"{type(error).__name__}: {error}"}
    return running, {
        "graphs": dict(recorder.counts),
        "texts": {k: t for k, t in recorder.texts.items() if k not in known},
        "bits": bits,
        "peak": peak,
        "first": time.perf_counter() - start,
    }


def _train(configuration: Configuration) -> tuple[Running, dict[str, str], int | None]:
    """Call it three times: digests of what it returned and left, and its peak in the last call."""
    running = make(configuration, STEPS)
    torch.manual_seed(1)
    returned: list[Any] = []
    *first, last = running.batches
    returned += [running.call(*batch) for batch in first]
    peak = None
    if configuration.strategy in THREADED:
        returned.append(running.call(*last))
    else:
        peak = peak_bytes(lambda: returned.append(running.call(*last)))
    kinds = {"outputs": returned, **running.left()}
    return running, {kind: _digest(values) for kind, values in kinds.items()}, peak


def _digest(values: object) -> str:
    """A digest of every bit in nested tensors and numbers, and of where they are."""
    digest = sha256()
    for path, leaf in tree_flatten_with_path(values)[0]:
        digest.update(repr(path).encode())
        if isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:16]


def _seconds(running: Running, calls: int) -> float:
    """Seconds of one call, over so many."""
    batches = list(itertools.islice(itertools.cycle(running.batches), calls))
    start = time.perf_counter()
    for batch in batches:
        running.call(*batch)
    return (time.perf_counter() - start) / calls


def _check_checkout(root: Path) -> None:
    """Refuse to measure another checkout than the one that was named."""
    import ipu_dynamo.passes
    import ipu_dynamo.runtime
    import poptorch

    for package in (ipu_dynamo, ipu_dynamo.passes, ipu_dynamo.runtime, poptorch):
        (found,) = package.__path__
        if root.resolve() not in Path(found).resolve().parents:
            raise SystemExit(f"{package.__name__} is {found}, not part of {root}")


if __name__ == "__main__":
    main()
