"""Check how replicas are divided into groups, and that groups are printed and read back."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ipu_dynamo import ReplicaGroups

SIZES = st.integers(1, 9)


@given(size=SIZES, groups=SIZES, orthogonal=st.booleans())
def test_every_replica_is_in_one_group(size, groups, orthogonal):
    of = ReplicaGroups(size, orthogonal)
    members = of.members(size * groups)
    assert len(members) == of.count(size * groups) == groups
    assert sorted(r for group in members for r in group) == list(range(size * groups))
    for number, group in enumerate(members):
        assert len(group) == size
        assert list(group) == sorted(group)
        assert {of.of(size * groups)[replica] for replica in group} == {number}


def test_groups_are_those_of_the_documentation():
    assert ReplicaGroups(2).members(8) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert ReplicaGroups(2, orthogonal=True).members(8) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert ReplicaGroups(4, orthogonal=True).members(8) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert ReplicaGroups(1).members(3) == ((0,), (1,), (2,))


@given(size=SIZES, orthogonal=st.booleans())
def test_printed_groups_can_be_read(size, orthogonal):
    assume(size > 1 or not orthogonal)  # groups of one are the same in both orders
    groups = ReplicaGroups(size, orthogonal)
    assert ReplicaGroups.parse(str(groups)) == groups


@pytest.mark.parametrize("text", ["", "group of 2 replicas", "group of 2 Orthogonal replicas", "2"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="group"):
        ReplicaGroups.parse(text)


@pytest.mark.parametrize("size", [0, -1, 1.0, "2", True])
def test_a_group_has_replicas(size):
    with pytest.raises(ValueError, match="count from 1"):
        ReplicaGroups(size)
