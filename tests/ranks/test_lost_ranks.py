"""Check that processes name a rank that is gone, and that an interrupt harms no other rank."""

import os
import subprocess
import sys

import pytest

ENDS = 120  # seconds
LIMIT = "10"


def outputs(folder, shape, name):
    """The exit codes of the ranks that do not fail, and the lines that all have printed."""
    rows, columns = map(int, shape.split("x"))
    command = [sys.executable, "-m", "tests.ranks.fail_on_mesh", folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "IPU_DYNAMO_RANK_TIMEOUT": LIMIT}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), shape, name],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(rows * columns)
    ]
    *others, last = ranks
    try:
        found = [rank.communicate(timeout=ENDS)[0] for rank in others]
        last.kill() if name == "stands_still" else last.wait(ENDS)
        found.append(last.communicate(timeout=ENDS)[0])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    return [rank.returncode for rank in others], found


@pytest.mark.parametrize(
    ("shape", "name", "problem"),
    [
        ("1x2", "is_killed", "RankLost rank 1 is gone"),
        pytest.param("1x3", "is_killed", "RankLost rank 2 is gone", marks=pytest.mark.slow),
        pytest.param("3x1", "is_killed", "RankLost rank 2 is gone", marks=pytest.mark.slow),
        pytest.param(
            "1x3", "stands_still", "RankLost rank 2 has shown no sign of", marks=pytest.mark.slow
        ),
        pytest.param(
            "3x1", "leaves", "RankLost rank 2 made 2 calls and left", marks=pytest.mark.slow
        ),
        pytest.param(
            "1x2", "reads_alone", "RanksDiffer ranks wait for each other", marks=pytest.mark.slow
        ),
    ],
)
def test_a_lost_rank_is_named_on_all_others(tmp_path, shape, name, problem):
    codes, found = outputs(tmp_path, shape, name)
    for code, output in zip(codes, found, strict=False):
        assert code == 1, output  # that of an exception
        assert f"\n{problem}" in f"\n{output}"


@pytest.mark.slow
def test_an_interrupted_rank_fails_the_step_on_all_and_the_next_call_works(tmp_path):
    codes, found = outputs(tmp_path, "2x1", "is_interrupted")
    assert codes == [0]
    assert found[0] == "RankFailed rank 1 failed: it was interrupted\n5 steps\n"
    assert found[1] == "KeyboardInterrupt \n5 steps\n"
