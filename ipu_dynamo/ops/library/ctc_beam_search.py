"""Define the decoder that finds the most probable label sequences, by a search over prefixes.

A prefix has two probabilities: that of all alignments so far that end in a blank, and that of those
that end in its last label. Each time step keeps the most probable prefixes of every sequence of the
batch, which go through all operators side by side.

Source: Graves, "Supervised sequence labelling with recurrent neural networks" (2012), section 7.5;
PopTorch user guide, "poptorch.ctc_beam_search_decoder".
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ipu_dynamo.ops.library.prefixes import UNUSED, Prefixes

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define(
    "ctc_beam_search(Tensor log_probs, Tensor lengths, int blank, int beam_width, int top_paths)"
    " -> (Tensor, Tensor, Tensor)"
)
_NOTHING = float("-inf")  # the logarithm of no probability


@dataclass
class _Beams:
    """The prefixes that are kept, `[batch, beams]`.

    Args:
        prefixes: their numbers.
        blank, label: logarithms of the probabilities that the last symbol is a blank, or a label.
    """

    prefixes: Tensor
    blank: Tensor
    label: Tensor


def _search(
    log_probs: Tensor, lengths: Tensor, blank: int, beam_width: int, top_paths: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ctc_beam_search`."""
    time, batch, classes = log_probs.shape
    wrong = lengths[(lengths < 0) | (lengths > time)]
    if wrong.numel():
        raise ValueError(f"a sequence of {time} time steps cannot have length {int(wrong[0])}")
    if log_probs.isnan().any():
        raise ValueError("log_probs has a nan")
    device = log_probs.device
    steps, lengths = log_probs.detach().cpu().double(), lengths.cpu().long()
    # Behind its end a sequence goes on with blanks, which change nothing.
    ended = torch.arange(time)[:, None] >= lengths
    steps = steps.masked_fill(ended[:, :, None], _NOTHING)
    steps[:, :, blank].masked_fill_(ended, 0.0)
    known = Prefixes(batch, classes, batch * (1 + time * beam_width))
    beams = _first(known, batch, beam_width)
    pairs = _promising(beam_width, classes - 1)
    for step in steps:
        beams = _advance(beams, step, blank, known, pairs)
    scores, path_lengths, labels = _best(beams, known, time, blank, top_paths)
    return (
        scores.to(log_probs.dtype).to(device),
        path_lengths.int().to(device),
        labels.int().to(device),
    )


def _first(known: Prefixes, batch: int, width: int) -> _Beams:
    prefixes = torch.full((batch, width), UNUSED)
    prefixes[:, 0] = known.empty
    nothing = torch.full((batch, width), _NOTHING, dtype=torch.float64)
    begun = nothing.clone()
    begun[:, 0] = 0.0
    return _Beams(prefixes, begun, nothing)


def _promising(width: int, labels: int) -> tuple[Tensor, Tensor]:
    """Ranks of beams and of labels whose pairs may be among the `width` best extensions.

    Every pair with smaller ranks beats the pair of ranks (r, s). A repeated label is an exception,
    as it needs a blank before it: at most one pair for each beam.
    """
    pairs = [(r, s) for r in range(width) for s in range(min(labels, width // (r + 1) + 1))]
    ranks = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return ranks[:, 0], ranks[:, 1]


def _advance(
    beams: _Beams,
    step: Tensor,
    blank: int,
    known: Prefixes,
    pairs: tuple[Tensor, Tensor],
) -> _Beams:
    """The beams after one more time step.

    Args:
        step: log-probabilities, `[batch, classes]`.
        pairs: see `_promising`.
    """
    (batch, width), classes = beams.prefixes.shape, step.shape[1]
    total = torch.logaddexp(beams.blank, beams.label)
    last = known.labels.take(beams.prefixes)
    of_last = step.gather(1, last.clamp_min(0)).masked_fill(last < 0, _NOTHING)

    # A prefix whose parent is kept, too, is also the parent with one more label.
    place = known.places_of_parents(beams.prefixes)
    merged = place >= 0
    place = place.clamp_min(0)
    repeats = last == last.gather(1, place)
    from_parent = torch.where(repeats, beams.blank.gather(1, place), total.gather(1, place))
    from_parent = (from_parent + of_last).masked_fill(~merged, _NOTHING)
    stay_blank = total + step[:, blank, None]
    stay_label = torch.logaddexp(beams.label + of_last, from_parent)

    order = total.argsort(dim=1, descending=True, stable=True)
    by_label = step.clone()
    by_label[:, blank] = _NOTHING
    likely, labels = by_label.sort(dim=1, descending=True, stable=True)
    beam_ranks, label_ranks = (ranks.expand(batch, -1) for ranks in pairs)
    sources, new_labels = order.gather(1, beam_ranks), labels.gather(1, label_ranks)
    repeats = new_labels == last.gather(1, sources)
    before = torch.where(repeats, beams.blank.gather(1, sources), total.gather(1, sources))
    extended = before + likely.gather(1, label_ranks)
    merges = torch.zeros(batch, width * classes, dtype=torch.bool)
    merges.scatter_(1, torch.where(merged, place * classes + last, blank), True)
    extended = extended.masked_fill(merges.gather(1, sources * classes + new_labels), _NOTHING)

    scores = torch.cat([torch.logaddexp(stay_blank, stay_label), extended], 1)
    chosen = _best_places(scores, width)
    best = scores.gather(1, chosen)
    stays = chosen < width
    old, new = chosen.clamp_max(width - 1), (chosen - width).clamp_min(0)
    prefixes = beams.prefixes.gather(1, old)
    if sources.shape[1]:
        grown = ~stays & (best > _NOTHING)
        parents = beams.prefixes.gather(1, sources.gather(1, new))
        prefixes[grown] = known.extended(parents[grown], new_labels.gather(1, new)[grown])
    prefixes = prefixes.masked_fill(best == _NOTHING, UNUSED)
    return _Beams(
        prefixes,
        stay_blank.gather(1, old).masked_fill(~stays, _NOTHING),
        torch.where(stays, stay_label.gather(1, old), best),
    )


def _best_places(scores: Tensor, count: int) -> Tensor:
    """Where the `count` best of each row are, in the row's order; of equal ones the first."""
    least = scores.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > least, scores == least
    left = count - above.sum(1, keepdim=True)
    taken = above | (equal & (equal.cumsum(1) <= left))
    return taken.nonzero()[:, 1].view(-1, count)


def _best(
    beams: _Beams, known: Prefixes, time: int, blank: int, top_paths: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The most probable prefixes; of equal ones the first in the order of a dictionary."""
    scores = torch.logaddexp(beams.blank, beams.label)
    lengths = known.lengths[beams.prefixes]
    labels = torch.full((*beams.prefixes.shape, time), -1)
    prefixes = beams.prefixes
    for _ in range(int(lengths.max())):
        depths = known.lengths[prefixes]
        at = (depths - 1).clamp_min(0).unsqueeze(2)
        there = torch.where(depths > 0, known.labels[prefixes], labels.gather(2, at).squeeze(2))
        labels.scatter_(2, at, there.unsqueeze(2))
        prefixes = torch.where(depths > 0, known.parents[prefixes], prefixes)
    order = torch.arange(prefixes.shape[1]).expand_as(prefixes)
    for place in reversed(range(int(lengths.max()))):
        column = labels[:, :, place].gather(1, order)
        order = order.gather(1, column.argsort(dim=1, stable=True))
    order = order.gather(1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True))
    order = order[:, :top_paths]
    labels = labels.gather(1, order.unsqueeze(2).expand(-1, -1, time))
    labels = labels.masked_fill(labels < 0, blank)
    return scores.gather(1, order), lengths.gather(1, order), labels


def _shapes(
    log_probs: Tensor, lengths: Tensor, blank: int, beam_width: int, top_paths: int
) -> tuple[Tensor, Tensor, Tensor]:
    time, batch, _ = log_probs.shape
    numbers = log_probs.new_empty(batch, top_paths, dtype=torch.int32)
    paths = log_probs.new_empty(batch, top_paths, time, dtype=torch.int32)
    return log_probs.new_empty(batch, top_paths), numbers, paths


_library.impl("ctc_beam_search", _search, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::ctc_beam_search", _shapes, lib=_library)


def ctc_beam_search(
    log_probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The most probable label sequences of each sequence of a batch.

    Repeated labels are one, unless a blank is between them, and blanks are left out. A path's
    probability is that of all its alignments. With at least as many beams as there are prefixes
    the result is exact. No gradient.

    Args:
        log_probs: `[time, batch, classes]`.
        lengths: `[batch]`, integers of 0 to `time`.
        blank: the class that is no label.
        beam_width: how many prefixes are kept.
        top_paths: how many paths are returned, at most `beam_width`.

    Returns:
        Logarithms of probabilities `[batch, top_paths]`, in decreasing order, -inf if there is
        no further path; lengths `[batch, top_paths]`; labels `[batch, top_paths, time]`, which are
        `blank` behind the end. Of equally probable paths the smaller labels come first.

    Raises:
        ValueError: arguments that do not go together.
    """
    if log_probs.dim() != 3 or not log_probs.is_floating_point():
        raise ValueError(f"log_probs is [time, batch, classes], not {list(log_probs.shape)}")
    time, batch, classes = log_probs.shape
    if lengths.shape != (batch,) or lengths.is_floating_point():
        raise ValueError(f"lengths has an integer for each of {batch} sequences")
    if not 0 <= blank < classes:
        raise ValueError(f"blank is {blank}, and there are {classes} classes")
    if not 1 <= top_paths <= beam_width:
        raise ValueError(
            f"top_paths is {top_paths}, and only beam_width={beam_width} prefixes are kept: choose "
            f"a number from 1 to {beam_width}, or raise beam_width"
        )
    if not time:
        raise ValueError("log_probs has no time step")
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.ipu.ctc_beam_search(
        log_probs, lengths, blank, beam_width, top_paths
    )
    return found
