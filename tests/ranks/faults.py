"""Kill drawn ranks of a training on four, and see that nothing is left and nothing is lost.

    python -m tests.ranks.faults --rounds 10

A round kills a drawn rank at a drawn place between the first step and the last, twice:

- torchrun ends with an error that names the rank, and no process is left;
- with `--max-restarts 1` all ranks go on from the latest checkpoint, and weights and states have
  the bits of a training that nothing disturbed.
"""

import argparse
import random
import tempfile
from pathlib import Path

import torch

from tests.ranks.struck import run_torchrun

SHAPE, RANKS = "2x2", 4
NOBODY = -1


def undisturbed(folder):
    """The tensors at the end, and the number of places of each rank."""
    code, output = run_torchrun("killed", folder, SHAPE, NOBODY, 0)
    assert code == 0, output
    found = results(folder)
    return found[0]["tensors"], [each["places"] for each in found]


def results(folder):
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def round_of(folder, rank, at, expected):
    """Kill a rank at a place, without and with a restart; returns the call of the restart."""
    for restarts in range(2):
        (inner := folder / str(restarts)).mkdir(parents=True)
        code, output = run_torchrun("killed", inner, SHAPE, rank, at, restarts=restarts)
        if restarts == 0:
            assert code != 0, output
            cause = output.partition("Root Cause")[2].replace(" ", "")
            assert f"rank:{rank}(local_rank:{rank})" in cause, output
            assert "exitcode:-9" in cause, output
            assert not [*inner.glob("rank*.pt")]
            continue
        assert code == 0, output
        found = results(inner)
        for each in found:
            assert each["tensors"].keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(each["tensors"][name], tensor), f"{name} has other bits"
        assert found[0]["first"] > 0, "no rank was killed, or none has taken a checkpoint"
    return found[0]["first"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    drawn = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (whole := folder / "whole").mkdir()
        expected, places = undisturbed(whole)
        for number in range(given.rounds):
            rank = drawn.randrange(RANKS)
            at = drawn.randint(1, 9 * places[rank] // 10)  # waits make a few calls more or fewer
            first = round_of(folder / f"round{number}", rank, at, expected)
            print(
                f"round {number}: rank {rank} killed at place {at} of {places[rank]}, "
                f"and all went on from call {first}",
                flush=True,
            )


if __name__ == "__main__":
    main()
