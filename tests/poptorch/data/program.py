"""Run a program with an asynchronous loader that is interrupted or killed from outside.

Usage: python -m tests.poptorch.data.program STRATEGY SECONDS_PER_ITEM
It prints the number of the loader's process and those of its workers.
"""

import os
import sys
import time

import poptorch
from poptorch import DataLoaderMode, SharingStrategy
from tests.batches.worker_processes import children, worker_of
from tests.poptorch.data.datasets import Slow


def main() -> None:
    """Read a loader until the end comes."""
    strategy, seconds = SharingStrategy[sys.argv[1]], float(sys.argv[2])
    loader = poptorch.DataLoader(
        poptorch.Options(),
        Slow(10**6, seconds),
        num_workers=2,
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": strategy},
    )
    items = iter(loader)
    next(items)
    accessor = worker_of(loader._accessor)
    processes = os.getpid(), accessor, *children(accessor)
    try:
        print(*processes, flush=True)  # whoever reads this may interrupt at once
        for _ in items:
            time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        next(iter(loader))
        print("and goes on", flush=True)


if __name__ == "__main__":
    main()
