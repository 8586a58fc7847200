"""Check that processes name a rank that is gone, and that an interrupt harms no other rank."""

import os
import socket
import subprocess
import sys

import pytest

from tests.ranks.fail_on_mesh import EVENTS, LIMIT, RANKS, SHAPES

ENDS = 240  # seconds
ERRORS = {
    "is_killed": "RankLost rank {lost} is gone",
    "stands_still": "RankLost rank {lost} has shown no sign of life",
    "leaves": "RankLost rank {lost} made 1 call and left",
    "reads_alone": "RanksDiffer ranks wait for each other in different operations",
}
STORE = "RankLost rank 0, or its host, is gone: its store does not answer"
OPERATIONS = {
    "message": "call 2 of program 1",
    "exchange": "call 2 of program 1",
    "vote": "call 2 of program 1",
    "agreement": "the compilation of Pipeline",
}


def outputs(folder, lost, wait, event):
    """The exit codes of the ranks, but for one that was killed, and the lines of all.

    No process is left.
    """
    command = [sys.executable, "-m", "tests.ranks.fail_on_mesh", folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "IPU_DYNAMO_RANK_TIMEOUT": str(LIMIT)}
    environment.pop("PYTHONUNBUFFERED", None)
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(lost), wait, event],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    found = dict.fromkeys(range(RANKS), "")
    try:
        for rank in [*(rank for rank in found if rank != lost), lost]:
            if rank == lost and event == "stands_still":
                ranks[rank].kill()
            found[rank] = ranks[rank].communicate(timeout=ENDS)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    return [rank.returncode for rank in ranks], [*found.values()]


def cases():
    for event in EVENTS:
        for wait in SHAPES:
            for lost in (RANKS - 1, 0):
                yield event, wait, lost


@pytest.mark.slow
@pytest.mark.parametrize(("event", "wait", "lost"), [*cases()])
def test_a_lost_rank_is_named_on_all_others(tmp_path, event, wait, lost):
    codes, found = outputs(tmp_path, lost, wait, event)
    expected = ERRORS[event].format(lost=lost)
    for rank in {*range(RANKS)} - {lost}:
        assert "\nRan" in f"\n{found[rank]}", found
        line, *lines = found[rank][f"\n{found[rank]}".index("\nRan") :].splitlines()
        assert codes[rank] == 1, found[rank]  # that of an exception
        if event == "reads_alone":
            assert line == expected, found[rank]
            ended, places = OPERATIONS[wait], "\n".join(lines)
            assert f"rank {lost}" in places, found[rank]
            assert "a check of ranks" in places or "a read of weights or states" in places
            assert ended in places, found[rank]
            continue
        is_first = lost == 0 and event in ("is_killed", "stands_still")
        assert line.startswith((STORE, expected) if is_first else expected), found[rank]
        assert OPERATIONS[wait] in line
        assert lines[0] == f"  rank: {lost} ({socket.gethostname()})", found[rank]


@pytest.mark.slow
def test_an_interrupted_rank_fails_the_step_on_all_and_the_next_call_works(tmp_path):
    codes, found = outputs(tmp_path, 1, "exchange", "is_interrupted")
    assert codes == [0, 0, 0], found
    failed = "RankFailed rank 1 failed: it was interrupted\n5 steps\n"
    assert found == [failed, "KeyboardInterrupt \n5 steps\n", failed]


@pytest.mark.slow
def test_a_rank_that_validates_for_longer_than_the_limit_ends_nothing(tmp_path):
    codes, found = outputs(tmp_path, 0, "exchange", "validates")
    assert codes == [0, 0, 0], found
    assert found == ["4 steps\n"] * RANKS
