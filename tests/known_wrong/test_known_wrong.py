"""Check that programs for which torch.compile is reported to compute wrong numbers are right."""

import pytest

from benchmarks.known_wrong import outcomes

REFUSED = {"custom_operator_that_writes_a_clone"}  # without a rule for its micro-batches
FEW = (  # for `make test`: those that were wrong operator by operator, and one of each kind
    "nearest_of_a_size_that_stays",
    "nearest_of_a_size_that_stays_in_double",
    "inputs_that_share_memory_in_a_later_call",
    "write_through_dropout",
    "clamp_by_more_than_the_type_holds",
    "copy_before_the_source_changes",
    "view_of_bits_before_a_write",
    "average_pool_with_ceil_mode",
    "moments_in_a_loop",
    "type_of_ldexp",
)


def not_right(kind, names=()):
    return {name: words for name, words in outcomes(kind, names).items() if words[0] != "right"}


def test_a_few_are_right_operator_by_operator():
    assert not_right("ipu-eager", FEW) == {}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["ipu-eager", "ipu-inductor"])
def test_all_are_right_or_refused(kind):
    found = not_right(kind)
    assert {name for name, (outcome, _) in found.items() if outcome == "refused"} <= REFUSED
    assert {name: words for name, words in found.items() if name not in REFUSED} == {}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_pytorch_has_many_of_these_faults():
    found = not_right("inductor")
    assert sum(outcome in ("wrong", "dies") for outcome, _ in found.values()) >= 25, found
