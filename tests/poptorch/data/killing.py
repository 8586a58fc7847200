"""Kill processes of asynchronous loaders at random times, and see what is left.

Usage: python -m tests.poptorch.data.killing [ROUNDS [SEED]]
"""

import os
import random
import signal
import sys
import time
from dataclasses import dataclass

import poptorch
from poptorch import DataLoaderMode, SharingStrategy
from tests.batches.worker_processes import (
    alive,
    check_that_none_stays,
    children,
    seconds_until,
    segments,
    worker_of,
)
from tests.poptorch.data.datasets import Arrays

ERROR, ACCESSOR, WORKERS = 5.0, 5.0, 12.0  # seconds that each may take


@dataclass(frozen=True)
class Round:
    """What was killed, and the seconds until the rest had noticed.

    Args:
        what: the loader, and which of its processes was killed.
        error: until the program was told.
        accessor, workers: until these processes were gone, from `terminate()` on.
        text: of the error.
    """

    what: str
    error: float
    accessor: float
    workers: float
    text: str


def killed_round(chance: random.Random) -> Round:
    """Make a loader, kill one of its processes after a while, and wait for the others."""
    strategy = chance.choice([SharingStrategy.Fork, SharingStrategy.ForkServer])
    nbytes, workers = chance.choice([4096, 16 << 20]), chance.choice([0, 1, 2])
    shared = segments()
    loader = poptorch.DataLoader(
        poptorch.Options(),
        Arrays(50, nbytes // 4),
        4,
        num_workers=workers,
        mode=chance.choice([DataLoaderMode.Async, DataLoaderMode.AsyncRebatched]),
        async_options={"sharing_strategy": strategy, "early_preload": chance.random() < 0.5},
    )
    accessor = worker_of(loader._accessor)
    helpers = children(accessor)
    assert len(helpers) == workers
    victim = chance.choice([accessor, *helpers])
    end = time.monotonic() + chance.random() * 0.3
    while time.monotonic() < end:
        for item in loader:
            assert item.shape == (4, nbytes // 32)
            if time.monotonic() >= end:
                break
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    text = ""
    while not text:
        assert time.monotonic() - start < ERROR, "no error"
        try:
            for _ in loader:
                assert time.monotonic() - start < ERROR, "no error"
        except AssertionError as error:
            text = str(error)
    noticed = time.monotonic() - start
    assert noticed < ERROR
    assert f"{victim}" in text, text
    start = time.monotonic()
    loader.terminate()
    gone = time.monotonic() - start + seconds_until(lambda: not alive(accessor), ACCESSOR)
    seconds_until(lambda: not any(alive(helper) for helper in helpers), WORKERS)
    all_gone = time.monotonic() - start
    assert gone < ACCESSOR
    assert all_gone < WORKERS
    check_that_none_stays(shared)
    what = f"{strategy.name}, {nbytes} bytes, {workers} workers, "
    return Round(
        what + ("accessor" if victim == accessor else "worker"), noticed, gone, all_gone, text
    )


def main() -> None:
    """Do some rounds and print how long the slowest took."""
    count, seed = (int(arguments) for arguments in (*sys.argv[1:], "200", "0")[:2])
    chance = random.Random(seed)
    rounds = []
    for number in range(count):
        rounds.append(killed_round(chance))
        print(number, rounds[-1], flush=True)
    for name in ("error", "accessor", "workers"):
        spent = sorted(getattr(one, name) for one in rounds)
        print(f"{name}: median {spent[len(spent) // 2]:.3f} s, longest {spent[-1]:.3f} s")


if __name__ == "__main__":
    main()
