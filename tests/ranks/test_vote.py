"""Check that ranks complete a step together, or raise the same error."""

import pytest
import torch

from ipu_dynamo.errors import (
    CompileError,
    ExecutionError,
    InputError,
    NonFiniteNorm,
    ProgramError,
    RankFailed,
    RanksDiffer,
    UpdateError,
)
from ipu_dynamo.runtime.ranks.vote import CommonValue, StepFailure, vote
from ipu_dynamo.testing.rank_threads import run_failing_ranks, run_ranks


def votes(rows, columns, failures=None, equal=lambda share: ()):
    """What each rank raises or returns."""

    def run(transport):
        failure = (failures or {}).get(transport.share.rank)
        return vote(transport, failure, equal(transport.share))

    return run_failing_ranks(rows, columns, run)


def rate(value, **settings):
    """A value that all ranks must have."""
    name = "settings of the step"
    return CommonValue(name, value, lambda: {"learning rate": f"0.{value}"}, **settings)


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 1), (2, 2)])
def test_ranks_that_agree_exchange_two_reductions_and_nothing_else(rows, columns):
    def run(transport):
        calls = []
        maximum = transport.maximum
        transport.maximum = lambda *of: (calls.append(of[0]), maximum(*of))[1]
        transport.gather = None
        assert vote(transport, None, [rate(5), rate(transport.share.row, among="row")]) == []
        return calls

    assert run_ranks(rows, columns, run) == [["row", "column"]] * rows * columns


ERRORS = [
    ExecutionError("mean(): bad", stage=1, instruction="call f", micro_batch=3, where="m.py:2"),
    InputError("argument x has 3 rows", hint="give 4"),
    CompileError("no such thing", where="m.py:3", hint="leave it", id="value"),
    NonFiniteNorm(float("inf"), 2.0),
    UpdateError("an update failed", hint="write weights again"),
    ProgramError("it is wrong", instruction=object()),
    RanksDiffer("ranks have different seeds", {0: "1", 1: "2"}),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_this_package_arrives_with_its_fields(error):
    text, fields = str(error), {k: v for k, v in vars(error).items() if k != "instruction"}
    outcomes = votes(2, 2, {2: StepFailure(error)})
    assert outcomes[2] is error
    host = error.host
    assert host
    for outcome in outcomes:
        assert type(outcome) is type(error)
        assert (outcome.id, outcome.rank, outcome.host) == (error.id, 2, host)
        assert str(outcome) == f"{text}\n  rank: 2 ({host})"
        assert fields.items() <= vars(outcome).items()
        assert str(vars(outcome).get("instruction")) == str(vars(error).get("instruction"))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("x"), "rank 1 failed: KeyError: 'x'"),
        (KeyboardInterrupt(), "rank 1 failed: it was interrupted"),
        (MemoryError(), "rank 1 failed: MemoryError: "),
    ],
    ids=["error of a callback", "Ctrl-C", "memory"],
)
def test_another_error_is_raised_as_it_is_and_named_elsewhere(error, text):
    first, second, third = votes(3, 1, {1: StepFailure(error)})
    assert second is error
    for outcome in (first, third):
        assert type(outcome) is RankFailed
        assert str(outcome) == f"{text}\n  rank: 1 ({outcome.host})"
        assert (outcome.rank, outcome.problem) == (1, text)


def test_the_first_place_is_the_cause_and_an_error_of_zeros_is_its_context():
    late = InputError("made by zeros")
    cause = InputError("the cause")
    outcomes = votes(2, 1, {0: StepFailure(late, (4, 1)), 1: StepFailure(cause, (3, 2))})
    assert outcomes[1] is cause
    assert str(outcomes[0]) == str(cause)
    assert outcomes[0].__cause__ is late
    assert late.rank is None


def test_an_interrupted_rank_raises_its_own_interrupt():
    interrupts = [KeyboardInterrupt(), KeyboardInterrupt()]
    outcomes = votes(3, 1, {r: StepFailure(error) for r, error in enumerate(interrupts)})
    assert outcomes[:2] == interrupts
    assert (type(outcomes[2]), outcomes[2].rank) == (RankFailed, 0)


def test_a_rank_failed_outweighs_a_value_that_differs():
    outcomes = votes(2, 1, {0: StepFailure(InputError("x"))}, lambda share: [rate(share.rank)])
    assert [type(outcome) for outcome in outcomes] == [InputError, InputError]


@pytest.mark.parametrize("other", [0, 3])
def test_a_value_that_differs_is_named_with_its_ranks(other):
    outcomes = votes(2, 2, equal=lambda share: [rate(1), rate(5 - (share.rank == other))])
    ranks = ", ".join(str(rank) for rank in range(4) if rank != other)
    lines = {f"  rank {other}: 0.4", f"  ranks {ranks}: 0.5"}
    for outcome in outcomes:
        assert type(outcome) is RanksDiffer
        head, *values, hint = str(outcome).splitlines()
        assert head == "ranks have different learning rate"
        assert {*values} == lines
        assert hint == "  try:  give all ranks the same"
        assert outcome.values == {r: "0.4" if r == other else "0.5" for r in range(4)}


def test_all_62_bits_of_a_value_count_and_more_do_not():
    def differ(values):
        outcomes = votes(2, 1, equal=lambda share: [rate(values[share.rank])])
        return [type(outcome) for outcome in outcomes]

    assert differ([0, 1 << 61]) == [RanksDiffer] * 2
    assert differ([(1 << 62) - 1, 0]) == [RanksDiffer] * 2
    assert differ([1 << 62, 0]) == [list] * 2


def test_rows_may_have_different_arguments_but_not_the_ranks_of_one_row():
    def arguments(share, other=None):
        value = share.row + 1 if share.rank != other else 7
        return [CommonValue("arguments", value, dict, among="row")]

    assert votes(2, 2, equal=arguments) == [[]] * 4
    outcomes = votes(2, 2, equal=lambda share: arguments(share, 2))
    assert [type(outcome) for outcome in outcomes] == [RanksDiffer] * 4


def weights(share, digests):
    """Counts of writes that differ: the ranks of each column compare their tensors."""
    parts = {f"weight {share.column}": digests[share.rank]}
    settings = {"parts_among": "column", "may_differ": True}
    return [CommonValue("weights", share.rank, lambda: parts, **settings)]


def test_counts_that_differ_pass_if_the_ranks_of_each_column_have_equal_tensors():
    outcomes = votes(2, 2, equal=lambda share: weights(share, "abab"))
    assert [[each.name for each in outcome] for outcome in outcomes] == [["weights"]] * 4
    for outcome in votes(2, 2, equal=lambda share: weights(share, "abax")):
        assert str(outcome).splitlines()[0] == "ranks have different weight 1"
        assert outcome.values == {1: "b", 3: "x"}


def test_a_vote_after_a_failed_one_is_a_new_one():
    def run(transport):
        for step in range(2):
            failure = StepFailure(InputError("x")) if step == transport.share.rank else None
            with pytest.raises(InputError, match=f"rank: {step}"):
                vote(transport, failure)
        assert vote(transport) == []
        return transport.maximum("mesh", torch.tensor([7])).item()

    assert run_ranks(2, 1, run) == [7, 7]
