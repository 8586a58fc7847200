"""Check that processes on a DeviceMesh train with the bits of one process."""

import os
import subprocess
import sys

import pytest

from tests.ranks.same_program import OtherPipeline, text_of

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


@pytest.mark.slow
def test_ranks_have_the_text_of_one_process_or_see_the_line_that_differs(tmp_path):
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]

    def texts(*arguments):
        folder = tmp_path / str(len(arguments))
        folder.mkdir()
        subprocess.run(
            [sys.executable, *start, "-m", "tests.ranks.same_program", folder, *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            timeout=ENDS,
        )
        return [(folder / f"rank{rank}.txt").read_text() for rank in range(3)]

    assert texts() == [text_of(None)] * 3
    first, *others = texts("--other", "2")
    assert others == [first] * 2
    assert first.startswith("RanksDiffer: the ranks differ in programs, first in line ")
    own, theirs = text_of(None).splitlines(), text_of(None, OtherPipeline).splitlines()
    assert own != theirs
    assert "\n  ranks 0, 1: " in first
    assert "\n  rank 2: " in first
