"""Check that shares cover a program, and that ranks find each other."""

from hypothesis import given
from hypothesis import strategies as st

from ipu_dynamo.program.share import Share

SIDES = st.tuples(*[st.integers(1, 5)] * 2)


@given(mesh=SIDES, each=st.integers(1, 4), more=st.integers(0, 9))
def test_each_place_has_the_rank_whose_blocks_it_is_in(mesh, each, more):
    rows, columns = mesh
    replicas, ipus = rows * each, columns + more
    shares = [Share(*mesh, 0, 0).of_rank(rank) for rank in range(rows * columns)]
    assert [share.rank for share in shares] == [*range(shares[0].ranks)]
    found = {}
    for share in shares:
        for replica in share.replicas(replicas):
            for ipu in share.ipus(ipus):
                assert (replica, ipu) not in found
                found[replica, ipu] = share.rank
        assert share.rank in share.of_row
        assert share.rank in share.of_column
    assert len(found) == replicas * ipus
    for (replica, ipu), rank in found.items():
        assert shares[0].rank_of(replica, ipu, replicas, ipus) == rank


def test_ranks_of_a_row_run_the_same_replicas_and_those_of_a_column_the_same_ipus():
    share = Share(3, 2, 1, 0)
    assert [*share.of_row] == [2, 3]
    assert [*share.of_column] == [0, 2, 4]
    assert {share.of_rank(rank).replicas(6) for rank in share.of_row} == {range(2, 4)}
    assert {share.of_rank(rank).ipus(5) for rank in share.of_column} == {range(3)}
