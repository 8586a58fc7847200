"""Check which ranks a watch gives up, and that it waits for all others."""

import json
import logging
import re
import threading
import time

import pytest

from ipu_dynamo.errors import OptionError, RankLost, RanksDiffer
from ipu_dynamo.program.share import Share
from ipu_dynamo.runtime.ranks import watch as watches
from ipu_dynamo.runtime.ranks.watch import Watch, limit_of_environment

INTERVAL = 0.1  # seconds between beats
BRIEF = 20 * INTERVAL  # until nothing is lost


class MemoryStore:
    """A store in this process, which may break, or never answer again."""

    def __init__(self):
        self.values, self.breaks, self.blocks = {}, False, False
        self._lock = threading.Lock()

    def _answer(self):
        if self.breaks:
            raise RuntimeError("Broken pipe")
        if self.blocks:
            threading.Event().wait()

    def set(self, key, value):
        self._answer()
        self.values[key] = value.encode()

    def check(self, keys):
        self._answer()
        return all(key in self.values for key in keys)

    def get(self, key):
        self._answer()
        return self.values[key]

    def compare_set(self, key, expected, value):
        self._answer()
        with self._lock:
            return self.values.setdefault(key, value.encode())


def watch_of(rank, store, *, rows=4, columns=1, limit=0.0):
    watch = Watch(Share(rows, columns, *divmod(rank, columns)), limit=limit, interval=INTERVAL)
    watch.start(store)
    return watch


def last_beat(store, rank, *, left="", begun=None, now=()):
    """Write the beat of a rank that writes no other."""
    beat = {"number": 7, "host": f"host{rank}", "begun": begun or {}, "now": now, "left": left}
    store.set(f"beat {rank}", json.dumps(beat))


def lost(watch, seconds=60.0):
    """The error of a watch once there is one; None if none comes in that time."""
    end = time.monotonic() + seconds
    while watch.lost is None and time.monotonic() < end:
        time.sleep(INTERVAL / 10)
    return watch.lost


@pytest.fixture
def store():
    """A store that ends the threads of its watches after the test."""
    store = MemoryStore()
    yield store
    store.values["failure"] = json.dumps({"problem": "end"}).encode()


def test_of_a_broken_connection_the_silent_rank_is_named_on_all_ranks(store):
    last_beat(store, 1)
    first, other = watch_of(0, store), watch_of(2, store)
    error = first.cause([1, 2], "a connection has ended")
    assert type(error) is RankLost
    places = "it was in no operation of the mesh, and rank 0 is in no operation"
    assert str(error) == f"rank 1 is gone: a connection has ended; {places}\n  rank: 1 (host1)"
    assert str(lost(other)) == str(error)
    assert other.lost.rank == 1


def test_the_rank_of_a_broken_connection_stays_unknown_if_all_are_alive(store):
    first, _, _ = (watch_of(rank, store) for rank in range(3))
    error = first.cause([1, 2], "a connection has ended")
    assert (str(error), error.rank) == ("a connection has ended", None)


def test_the_first_record_is_the_cause_everywhere(store):
    ranks = [watch_of(rank, store) for rank in range(2)]
    last_beat(store, 2, left="made 3 calls and left")
    last_beat(store, 3, left="made 4 calls and left")
    with ranks[0].waiting([2]), ranks[1].waiting([3]):
        errors = [str(lost(watch)) for watch in ranks]
    assert errors[0] == errors[1]


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_is_silent_beyond_the_limit_is_gone_for_those_that_wait(store, waits):
    last_beat(store, 1)
    watch = watch_of(0, store, limit=5 * INTERVAL)
    with watch.waiting([1] if waits else []):
        error = lost(watch) if waits else lost(watch, BRIEF)
    if waits:
        assert str(error).startswith("rank 1 has shown no sign of life for ")
        assert (error.rank, error.host) == (1, "host1")
    else:
        assert error is None


def test_a_live_rank_is_waited_for_and_named_in_the_log(store, monkeypatch, caplog):
    monkeypatch.setattr(watches, "_PATIENT", 4 * INTERVAL)
    caplog.set_level(logging.WARNING, "ipu_dynamo")
    watch, other = watch_of(0, store, limit=15 * INTERVAL), watch_of(1, store)
    with other.operation("mesh", "read", "a read of weights"), watch.waiting([1]):
        assert lost(watch, BRIEF) is None
    (line,) = caplog.messages
    assert re.fullmatch(
        r"rank 0 has waited \d+ s for rank 1 \(.+\), which is in a read of weights", line
    )


def test_a_rank_that_left_is_gone_for_those_that_wait(store):
    watch, other = watch_of(0, store), watch_of(1, store)
    for call in range(2):
        with other.operation("mesh", "call", f"call {call}"):
            pass
    other.leave()
    with watch.operation("mesh", "call", "call 3"), watch.waiting([1]):
        error = lost(watch)
    assert str(error).startswith("rank 1 made 2 calls and left; rank 0 is in call 3")


def test_a_rank_that_leaves_blames_no_other_for_connections_that_it_closes(store):
    watch = watch_of(0, store)
    with watch.waiting([1]):
        assert watch.has_waits
        watch.leave()
    assert not watch.has_waits
    assert watch.cause([1], "a connection has ended").rank is None
    assert "failure" not in store.values


def test_torchrun_has_time_to_name_a_lost_rank_that_others_have_logged(store, monkeypatch, caplog):
    def sleep(seconds):
        if seconds == watches._LAUNCHER:
            noted.append((watch.lost, store.values["failure"], caplog.messages))
        time.sleep(min(seconds, INTERVAL))

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(watches, "sleep", sleep)
    last_beat(store, 1, left="made 3 calls and left")
    watch, noted = watch_of(0, store), []
    with watch.waiting([1]):
        error = lost(watch)
    assert isinstance(error, RankLost)
    for before, record, (line,) in noted:
        assert (before, line) == (None, str(error))
        assert error.problem in record.decode()
    assert noted


CALL, READ = ["mesh", 5, "call", "call 5"], ["mesh", 5, "read", "a read of weights"]
ROW = ["row", 2, "read", "a read of its row"]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("theirs", "begun", "rank", "ends"),
    [
        pytest.param(READ, {"mesh": 5}, 1, False, id="another kind"),
        pytest.param(CALL, {"mesh": 5}, 1, True, id="the same"),
        pytest.param(["mesh", 6, "call", "call 6"], {"mesh": 6}, 1, True, id="ahead"),
        pytest.param(ROW, {"mesh": 4, "row": 2}, 1, False, id="each in one the other lacks"),
        pytest.param(ROW, {"mesh": 5, "row": 2}, 1, True, id="it has begun this one"),
        pytest.param(["row", 1, "read", ""], {"mesh": 4, "row": 1}, 1, True, id="begun here"),
        pytest.param(ROW, {"mesh": 4, "row": 2}, 2, True, id="another row"),
    ],
)
def test_operations_that_cannot_both_end_are_found(store, theirs, begun, rank, ends):
    watch = watch_of(0, store, rows=2, columns=2)
    last_beat(store, rank, begun=begun, now=[theirs])
    with watch.operation("row", "read", "a read before"):
        pass
    for _ in range(4):
        with watch.operation("mesh", "call", "a call before"):
            pass
    with watch.operation("mesh", "call", "call 5"), watch.waiting([rank]):
        error = lost(watch, 8 * INTERVAL) if ends else lost(watch)
    if ends:
        assert error is None
        return
    assert type(error) is RanksDiffer
    assert error.values == {0: "call 5", 1: theirs[3]}
    with pytest.raises(RanksDiffer), watch.operation("mesh", "call", "call 6"):
        raise AssertionError("the mesh is lost")


@pytest.mark.parametrize(("among", "lost_rank"), [("mesh", 0), ("row", 3)])
def test_a_connection_that_breaks_behind_the_store_is_rank_0s_if_it_takes_part(
    store, among, lost_rank
):
    first, watch = watch_of(0, store, columns=2), watch_of(2, store, columns=2)
    assert not first.has_waits
    with watch.operation(among, "call", "call 5"), watch.waiting([3]):
        while 0 not in watch._hosts:
            time.sleep(INTERVAL / 10)
        store.breaks = True
        error = watch.cause([3], "a connection has ended")
    assert error.rank == lost_rank
    assert str(error).endswith(f"rank: 0 ({error.host})" if lost_rank == 0 else "rank: 3")
    assert "rank 2 is in call 5" in str(error)


def test_all_ranks_read_that_rank_0_has_left_from_the_first_that_notices(store):
    last_beat(store, 0, left="made 3 calls and left")
    watch, other = (watch_of(rank, store) for rank in (1, 2))
    with watch.waiting([0]):
        error = lost(watch)
    assert error.problem.startswith("rank 0 made 3 calls and left")
    assert str(lost(other)) == str(error)
    watch.leave()
    assert json.loads(store.get("beat 1"))["left"]


def test_rank_0_serves_its_store_until_the_others_have_left(store):
    first, other = (watch_of(rank, store, rows=2) for rank in range(2))
    leaving = threading.Thread(target=first.leave)
    leaving.start()
    leaving.join(INTERVAL)
    assert leaving.is_alive()
    other.leave()
    leaving.join(60)
    assert json.loads(store.get("beat 1"))["left"]


@pytest.mark.parametrize(("rank", "ends"), [(0, True), (2, False), (None, False)])
def test_a_store_that_is_gone_ends_waits_for_its_rank_alone(store, rank, ends):
    watch = watch_of(1, store)
    store.breaks = True
    with watch.waiting([] if rank is None else [rank]):
        error = lost(watch) if ends else lost(watch, 8 * INTERVAL)
    assert (error is not None and error.rank == 0) == ends


def test_a_store_that_never_answers_ends_waits_after_the_limit(store):
    watch = watch_of(1, store, limit=6 * INTERVAL)
    store.blocks = True
    assert lost(watch, 9 * INTERVAL) is None
    with watch.waiting([2]):
        assert lost(watch).rank == 0
    watch.leave()  # does not block


def test_those_who_follow_are_told_as_long_as_they_exist(store):
    class Follower:
        def lose(self, error):
            told.append(error)

    watch, told, follower, gone = watch_of(0, store), [], Follower(), Follower()
    watch.follow(follower.lose)
    watch.follow(gone.lose)
    del gone
    last_beat(store, 1, left="made 0 calls and left")
    with watch.waiting([1]):
        error = lost(watch)
    late = Follower()
    watch.follow(late.lose)
    assert told == [error, error]


def test_the_limit_is_a_minute_unless_the_environment_says_another(monkeypatch):
    monkeypatch.delenv("IPU_DYNAMO_RANK_TIMEOUT", raising=False)
    assert limit_of_environment() == 60
    monkeypatch.setenv("IPU_DYNAMO_RANK_TIMEOUT", "2.5")
    assert limit_of_environment() == 2.5
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("IPU_DYNAMO_RANK_TIMEOUT", text)
        with pytest.raises(OptionError, match=f"seconds.* is '{text}'"):
            limit_of_environment()
