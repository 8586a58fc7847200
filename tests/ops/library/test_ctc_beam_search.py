"""Check the CTC decoder against all alignments that there are."""

import itertools
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ipu_dynamo
from ipu_dynamo import Options
from ipu_dynamo.ops.library.ctc_beam_search import ctc_beam_search


def all_paths(log_probs, blank):
    """The probability of every label sequence: the sum over its alignments."""
    time, classes = log_probs.shape
    probabilities = defaultdict(float)
    for alignment in itertools.product(range(classes), repeat=time):
        labels = tuple(c for c, _ in itertools.groupby(alignment) if c != blank)
        terms = [log_probs[t, c].item() for t, c in enumerate(alignment)]
        probabilities[labels] += torch.tensor(terms, dtype=torch.float64).sum().exp().item()
    return probabilities


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.data())
def test_with_enough_beams_it_equals_brute_force(seed, time, classes, blank, data):
    torch.manual_seed(seed)
    blank = min(blank, classes - 1)
    scores = torch.randn(time, 3, classes, dtype=torch.float64) * data.draw(
        st.sampled_from([1.0, 8.0])
    )
    if data.draw(st.booleans()):  # many ties
        scores = scores.round()
    log_probs = scores.log_softmax(2)
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, time), min_size=3, max_size=3)))
    beams = 1 + sum((classes - 1) ** n for n in range(1, time + 1))
    top = data.draw(st.integers(1, min(beams, 6)))
    found, counts, labels = ctc_beam_search(log_probs, lengths, blank, beams, top)
    assert (found.shape, counts.shape, labels.shape) == ((3, top), (3, top), (3, top, time))
    for row, length in enumerate(lengths.tolist()):
        wanted = all_paths(log_probs[:length, row], blank)
        best = sorted(wanted.values(), reverse=True)[:top]
        assert found[row, : len(best)].exp().tolist() == pytest.approx(best, abs=1e-9)
        assert (found[row, len(best) :] == float("-inf")).all()
        paths = [
            tuple(path[:count])
            for path, count in zip(labels[row].tolist(), counts[row].tolist(), strict=True)
        ][: len(best)]
        assert len(set(paths)) == len(paths)
        for path, probability in zip(paths, found[row].exp().tolist(), strict=False):
            assert wanted[path] == pytest.approx(probability, abs=1e-9)


def plain_search(log_probs, blank, width):
    """A search over prefixes in plain Python, one sequence at a time."""
    beams = {(): (0.0, float("-inf"))}

    def add(*terms):
        return torch.tensor(terms, dtype=torch.float64).logsumexp(0).item()

    for step in log_probs.double().tolist():
        new = defaultdict(lambda: (float("-inf"), float("-inf")))
        for prefix, (in_blank, in_label) in beams.items():
            both = add(in_blank, in_label)
            for label, p in enumerate(step):
                if label == blank:
                    new[prefix] = (add(new[prefix][0], both + p), new[prefix][1])
                    continue
                repeated = bool(prefix) and prefix[-1] == label
                if repeated:
                    new[prefix] = (new[prefix][0], add(new[prefix][1], in_label + p))
                longer = (*prefix, label)
                begun = in_blank if repeated else both
                new[longer] = (new[longer][0], add(new[longer][1], begun + p))
        kept = sorted(new, key=lambda prefix: add(*new[prefix]), reverse=True)[:width]
        beams = {prefix: new[prefix] for prefix in kept}
    return sorted(((add(*p), prefix) for prefix, p in beams.items()), reverse=True)


@pytest.mark.parametrize("width", [1, 2, 5, 13])
def test_with_few_beams_it_keeps_what_a_plain_search_keeps(width):
    torch.manual_seed(width)
    log_probs = torch.randn(12, 4, 6).mul(2).log_softmax(2)
    found, counts, labels = ctc_beam_search(
        log_probs, torch.full((4,), 12), 2, width, min(width, 3)
    )
    for row in range(4):
        wanted = plain_search(log_probs[:, row], 2, width)
        for place in range(min(width, 3)):
            probability, path = wanted[place]
            assert found[row, place].item() == pytest.approx(probability, abs=1e-5)
            assert tuple(labels[row, place, : counts[row, place]].tolist()) == path
            assert (labels[row, place, counts[row, place] :] == 2).all()


def test_equal_paths_come_in_the_order_of_their_labels():
    log_probs = torch.full((1, 1, 4), 0.25).log()
    found, counts, labels = ctc_beam_search(log_probs, torch.tensor([1]), 3, 9, 5)
    assert counts.tolist() == [[0, 1, 1, 1, 0]]
    assert labels.flatten().tolist() == [3, 0, 1, 2, 3]
    assert found[0, 4] == float("-inf")


def test_a_sequence_is_decoded_the_same_alone_and_in_a_batch():
    torch.manual_seed(0)
    log_probs, lengths = torch.randn(9, 5, 4).log_softmax(2), torch.tensor([9, 0, 4, 7, 1])
    together = ctc_beam_search(log_probs, lengths, 0, 20, 4)
    for row in range(5):
        alone = ctc_beam_search(log_probs[:, row : row + 1], lengths[row : row + 1], 0, 20, 4)
        assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("shape", "lengths", "settings", "problem"),
    [
        ((3, 4), [3], {}, "time, batch, classes"),
        ((3, 2, 4), [3], {}, "an integer for each of 2 sequences"),
        ((3, 1, 4), [3], {"blank": 4}, "blank is 4, and there are 4 classes"),
        (
            (3, 1, 4),
            [3],
            {"beam_width": 2, "top_paths": 3},
            "beam_width=2 .* from 1 to 2, or raise beam_width",
        ),
        ((3, 1, 4), [4], {}, "3 time steps cannot have length 4"),
    ],
)
def test_what_does_not_go_together_is_refused(shape, lengths, settings, problem):
    with pytest.raises(ValueError, match=problem):
        ctc_beam_search(torch.zeros(shape), torch.tensor(lengths), **settings)


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_it_is_one_operator_of_a_program(engine):
    torch.manual_seed(0)
    scores, lengths = torch.randn(8, 4, 5), torch.tensor([8, 5, 1, 0])

    def forward(x, lengths):
        return ctc_beam_search(x.log_softmax(2).transpose(0, 1), lengths, 0, 10, 2)

    compiled = ipu_dynamo.compile_inference(forward, Options(engine=engine))
    found = compiled(scores.transpose(0, 1).contiguous(), lengths)
    expected = ctc_beam_search(scores.log_softmax(2), lengths, 0, 10, 2)
    assert torch.allclose(found[0], expected[0])
    assert all(map(torch.equal, found[1:], expected[1:]))
    assert str(compiled.program).count("ipu.ctc_beam_search(") == 1
