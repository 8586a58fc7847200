"""Load every program of a folder, in a process of its own, and go on with it."""

import os
import sys
from pathlib import Path

import torch

from ipu_dynamo import load

CALLS = 2


def go_on(run, batch):
    """What further calls return, and what they leave in the weights."""
    left = [[x.clone() for x in run(*batch)] for _ in range(CALLS)]
    return {"returned": left, "weights": {k: v.clone() for k, v in run.state_dict().items()}}


def main(folder: Path) -> None:
    """Write beside each program what became of it."""
    for path in sorted(folder.glob("*.saved")):
        batch = torch.load(path.with_suffix(".batch"), weights_only=True)
        torch.save(go_on(load(path), batch), path.with_suffix(".found"))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["THREADS"]))
    main(Path(sys.argv[1]))
