"""Check that processes on a DeviceMesh train with the bits of one process."""

import os
import subprocess
import sys

import pytest

ENDS = 120  # seconds


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ("1x2", ("replica", "ipu")),
        pytest.param("2x1", ("replica", "ipu"), marks=pytest.mark.slow),
        pytest.param("2x2", ("ipu", "replica"), marks=pytest.mark.slow),
    ],
)
def test_ranks_train_with_the_bits_of_one_process(shape, names, tmp_path):
    rows, columns = map(int, shape.split("x"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.train_on_mesh", tmp_path, str(rank), shape, *names],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(rows * columns)
    ]
    try:
        outputs = [rank.communicate(timeout=ENDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert f"{rows} row" in output
