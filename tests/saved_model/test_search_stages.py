"""Check the greedy splitter and the search for stages against references written from the spec.

Nothing of the search's own code is used to say what is expected.
"""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_dynamo.saved_model.conversion.pipelines.search_stages import Limits, Search, quantities
from ipu_dynamo.saved_model.conversion.pipelines.work_list import WorkNode
from ipu_dynamo.saved_model.pipeline import find_split


def all_splits(costs, groups):
    """What `find_split` shall give, by trying every separator with fractions."""
    if groups == 1:
        return [(len(costs),)]
    mean = Fraction(sum(map(Fraction, costs)), groups)
    tries = {}
    for i in range(1, len(costs) - groups + 2):
        tries[i] = (sum(map(Fraction, costs[:i])) - mean) ** 2 - i
    best = [i for i in tries if tries[i] == min(tries.values(), default=0)]
    return [(i, *rest) for i in best for rest in all_splits(costs[i:], groups - 1)]


@settings(max_examples=500)
@given(
    costs=st.lists(st.integers(0, 6) | st.floats(0, 4, allow_nan=False), max_size=10),
    groups=st.integers(1, 5),
)
def test_find_split_gives_every_split_of_the_greedy_rule(costs, groups):
    expected = all_splits(costs, groups) if len(costs) >= groups else []
    assert find_split(costs, groups) == expected


def test_equal_cuts_all_go_on():
    assert find_split([1, 1, 1, 3], 2) == [(3, 1)]
    splits = find_split([0, 1, 1, 0, 2, 1], 3)
    assert splits == all_splits([0, 1, 1, 0, 2, 1], 3)
    ties = [c for c in ([a, b, c, d] for a in range(4) for b in range(4) for c in range(4)
                        for d in range(4)) if len(find_split(c, 2)) > 1]  # fmt: skip
    assert ties, "no list has two equal cuts: the rule for them would not be seen"


def test_no_group_is_an_error():
    with pytest.raises(ValueError, match="groups is 0"):
        find_split([1], 0)


class Reference:
    """The search, written from its description, step by step and without shared code."""

    def __init__(self, nodes, memory, priority, iterations, low, high):
        self.cycles = [n[0] for n in nodes]
        self.live, self.transient = [n[1] for n in nodes], [n[2] for n in nodes]
        self.memory, self.priority, self.iterations = memory, priority, iterations
        self.low, self.high = low, high

    def free(self, stage_of, q):
        result = []
        for ipu in range(q):
            own = [i for i, stage in enumerate(stage_of) if stage == ipu]
            used = sum(self.live[i] for i in own)
            used += max([self.transient[i] for i in own], default=0)
            result.append(self.memory - used)
        return result

    def run(self):
        count = len(self.cycles)
        for q in (2, 4, 8, 16, 32, 64):
            if not max(2, self.low) <= q <= self.high or count < q:
                continue
            chunk = count // q + 1
            stage_of = [min(i // chunk, q - 1) for i in range(count)]
            reserve = self.memory * 17 // 100
            if sum(self.free(stage_of, q)) < reserve:
                continue
            nbytes = [a + b for a, b in zip(self.live, self.transient, strict=True)]
            costs = self.cycles if self.priority == "cycle" else nbytes
            sizes = all_splits(costs, q)[0]
            stage_of = [k for k in range(q) for _ in range(sizes[k])]
            free = self.free(stage_of, q)
            if min(free) >= 0 and sum(free) >= reserve:
                return stage_of, "greedy_search_solutions.pipeconf"
            for turn in range(self.iterations):
                for ipu in range(q):
                    if free[ipu] < 0:
                        self.move(stage_of, ipu, free, nbytes)
                free = self.free(stage_of, q)
                if min(free) >= 0:
                    return stage_of, f"greedy_search_solutions_tune_{turn}.pipeconf"
        return None

    def move(self, stage_of, ipu, free, nbytes):
        own = [i for i, stage in enumerate(stage_of) if stage == ipu]
        left = free[ipu - 1] if ipu > 0 else None
        right = free[ipu + 1] if ipu + 1 < len(free) else None
        if len(own) < 2 or left is right is None:
            return
        to_left = right is None or (left is not None and left >= right)
        half = Fraction((left if to_left else right) - free[ipu], 2)
        order = own if to_left else own[::-1]
        most = len(own) - 1
        run = [k for k in range(1, most + 1) if sum(nbytes[i] for i in order[:k]) <= half]
        for i in order[: max(run, default=1)]:
            stage_of[i] = ipu - 1 if to_left else ipu + 1


NODE = st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(0, 6))


@settings(max_examples=300)
@given(
    nodes=st.lists(NODE, min_size=1, max_size=16),
    memory=st.integers(4, 60),
    priority=st.sampled_from(["cycle", "memory"]),
    iterations=st.integers(0, 4),
    low=st.integers(1, 5),
    more=st.integers(0, 12),
)
def test_search_equals_its_reference_and_its_choice_fits(
    nodes, memory, priority, iterations, low, more
):
    check(nodes, memory, priority, iterations, low, more)


@pytest.mark.parametrize(
    ("nodes", "memory", "priority", "iterations", "more"),
    [
        pytest.param([(8, 12, 0), (7, 0, 12)], 12, "cycle", 3, 1, id="reserve of the first try"),
        pytest.param([(6, 4, 8), (5, 8, 4)], 12, "memory", 2, 3, id="reserve behind the split"),
        pytest.param(
            [(8, 0, 4), (7, 9, 0), (2, 2, 0), (4, 8, 0)], 17, "cycle", 2, 1, id="half moves"
        ),
        pytest.param(
            [(4, 11, 7), (9, 11, 10), (6, 0, 6)], 31, "cycle", 3, 7, id="one moves at least"
        ),
        pytest.param(
            [(6, 3, 9), (1, 7, 0), (3, 0, 0), (7, 5, 0)], 15, "cycle", 2, 1, id="from the boundary"
        ),
        pytest.param(
            [(8, 0, 7), (2, 4, 0), (1, 0, 9), (6, 0, 7), (4, 9, 2)], 12, "cycle", 1, 3,
            id="to the left of two equal ones",
        ),
    ],
)  # fmt: skip
def test_each_rule_of_the_search_decides_somewhere(nodes, memory, priority, iterations, more):
    check(nodes, memory, priority, iterations, 1, more)


def check(nodes, memory, priority, iterations, low, more):
    """Compare the search with its reference, and its choice with its own rules."""
    high = low + more
    work = [WorkNode(f"n{i}", *node) for i, node in enumerate(nodes)]
    limits = Limits(memory, priority, iterations, low, high)
    reference = Reference(nodes, memory, priority, iterations, low, high)
    expected = reference.run()
    if expected is None:
        with pytest.raises(ValueError, match=r"pipeline_cfg: (no stages|the program|no power)"):
            Search(work, limits).run()
        return
    choice = Search(work, limits).run()
    stage_of = [stage for stage, size in enumerate(choice.sizes) for _ in range(size)]
    assert (stage_of, choice.file) == expected
    assert min(reference.free(stage_of, len(choice.sizes))) >= 0
    assert len(choice.sizes) & (len(choice.sizes) - 1) == 0
    assert min(choice.sizes) >= 1


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(1, 64, [2, 4, 8, 16, 32, 64]), (3, 9, [4, 8]), (4, 4, [4])]
)
def test_quantities_are_powers_of_two_within_the_limits(low, high, expected):
    assert quantities(Limits(1, min_ipu_quantity=low, max_ipu_quantity=high)) == expected


def test_limits_without_a_power_of_two_name_both_keys():
    limits = Limits(1, min_ipu_quantity=5, max_ipu_quantity=7)
    with pytest.raises(ValueError, match="min_ipu_quantity 5 and max_ipu_quantity 7"):
        quantities(limits)


def test_tuning_is_reached_and_writes_its_number():
    nodes = [WorkNode("a", 1, 40, 0), WorkNode("b", 1, 40, 0), WorkNode("c", 4, 10, 0)]
    choice = Search(nodes, Limits(79, fine_tune_iter=3, max_ipu_quantity=2)).run()
    assert choice.file == "greedy_search_solutions_tune_0.pipeconf"
    assert choice.sizes == (1, 2)
    with pytest.raises(ValueError, match=r"last try was 2 IPUs with \[80, 10\] bytes used and"):
        Search(nodes, Limits(79, fine_tune_iter=0, max_ipu_quantity=2)).run()
