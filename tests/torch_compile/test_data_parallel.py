"""Check that DDP and FSDP2 train a compiled model as a plain one, on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.torch_compile.data_parallel import EAGER, INDUCTOR

ROOT = Path(__file__).parents[2]


def both_ranks(rows, folder, **environment):
    """What each rank has after training by each row, by its name."""
    command = [sys.executable, "-m", "tests.torch_compile.data_parallel", str(folder), *rows]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    ranks = []
    try:
        for rank in "01":
            ranks.append(subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": rank}))
        assert [rank.wait(timeout=500) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {name: [torch.load(folder / f"{name}.rank{rank}") for rank in "01"] for name in rows}


def check(row, ranks):
    """Hold what both ranks have to plain PyTorch, to each other, and to the expected programs."""
    for rank, found in enumerate(ranks):
        for name, tensor in found["eager"]["state"].items():
            ours = found["ipu"]["state"][name]
            torch.testing.assert_close(ours, tensor, rtol=0, atol=row.tolerance)
        losses = found["ipu"]["losses"], found["eager"]["losses"]
        torch.testing.assert_close(*losses, rtol=0, atol=row.tolerance)
        assert found["programs"] == row.programs
        if "micro_batches" not in row.options:  # of which some are before or after the others
            assert row.programs == 2 * found["graphs"]  # a plain backend's
        told = [text.partition(",")[0] for text in found["told"]]
        assert told == ([] if rank else row.told)  # once for all ranks
    first, second = (found["ipu"] for found in ranks)
    assert not torch.equal(first["losses"], second["losses"])  # they have other data
    for name, tensor in first["state"].items():
        if not name.split(".")[-1].startswith(("running_", "num_")):  # rank 0's before each step
            assert torch.equal(second["state"][name], tensor), name


@pytest.mark.few(1)
def test_trains_as_plain_pytorch_does(subtests, tmp_path):
    found = both_ranks(EAGER, tmp_path)
    for name, row in EAGER.items():
        with subtests.test(name):
            check(row, found[name])


@pytest.mark.slow
@pytest.mark.inductor
def test_ranks_compile_into_one_empty_folder(subtests, tmp_path):
    cache = tmp_path / "cache"
    folders = {"IPU_DYNAMO_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "i")}
    found = both_ranks(INDUCTOR, tmp_path, **folders)
    assert any(cache.iterdir())
    for name, row in INDUCTOR.items():
        with subtests.test(name):
            check(row, found[name])
