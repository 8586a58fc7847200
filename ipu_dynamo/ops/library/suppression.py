"""Define the choice of boxes that overlap little, among those of an object detector.

Source: PopART, "Nms" of domain ai.graphcore; Bodla et al., "Soft-NMS" (2017), for `sigma`.
"""

import torch
from torch import Tensor

from ipu_dynamo.ops.library.wrong_inputs import WrongInputs

_library = torch.library.Library("ipu", "FRAGMENT")
_library.define(
    "suppress_boxes(Tensor scores, Tensor boxes, float threshold, float sigma, float least, "
    "int count) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_NO_CLASS = 2147483647
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _suppress(
    scores: Tensor, boxes: Tensor, threshold: float, sigma: float, least: float, count: int
) -> Results:
    """See `suppress_boxes`; all images at once, one pair of box and class after the other."""
    batch, boxes_each, classes = scores.shape
    image = torch.arange(batch, device=scores.device)
    left = scores.detach().float().flatten(1).clone()
    corners = boxes.detach().float()
    area = (corners[..., 2:] - corners[..., :2]).clamp_min(0).prod(2)
    taken = _nothing(scores, boxes, count)
    indices, kept, places, labels, lengths = taken
    indices.fill_(-1), labels.fill_(_NO_CLASS)
    for place in range(count):
        best, pair = left.max(1)  # of equal ones the first: the lowest box, then the lowest class
        going_on = best > least
        if not going_on.any():
            break
        box, label = pair // classes, pair % classes
        indices[:, place] = torch.where(going_on, box, -1)
        labels[:, place] = torch.where(going_on, label, _NO_CLASS)
        kept[:, place] = best.masked_fill(~going_on, 0).to(kept.dtype)
        own = corners[image, box]
        places[:, place] = own.masked_fill(~going_on[:, None], 0).to(places.dtype)
        lengths += going_on.int()
        begin = torch.maximum(corners[..., :2], own[:, None, :2])
        end = torch.minimum(corners[..., 2:], own[:, None, 2:])
        common = (end - begin).clamp_min(0).prod(2)
        union = area + area[image, box][:, None] - common
        overlap = torch.where(union > 0, common / union, 0.0)
        of_class = left.view(batch, boxes_each, classes)[image, :, label]
        if sigma == 0:
            weaker = of_class.masked_fill(overlap > threshold, float("-inf"))
        else:
            still = of_class > least
            weaker = torch.where(still, of_class * (-(overlap**2) / sigma).exp(), of_class)
        weaker[image, box] = float("-inf")
        weaker = torch.where(going_on[:, None], weaker, of_class)
        left.view(batch, boxes_each, classes)[image, :, label] = weaker
    return taken


def _nothing(scores: Tensor, boxes: Tensor, count: int) -> Results:
    batch = scores.shape[0]
    return (
        scores.new_zeros(batch, count, dtype=torch.int32),
        scores.new_zeros(batch, count),
        boxes.new_zeros(batch, count, 4),
        scores.new_zeros(batch, count, dtype=torch.int32),
        scores.new_zeros(batch, dtype=torch.int32),
    )


def _shapes(
    scores: Tensor, boxes: Tensor, threshold: float, sigma: float, least: float, count: int
) -> Results:
    return _nothing(scores, boxes, count)


_library.impl("suppress_boxes", _suppress, "CompositeExplicitAutograd")
torch.library.register_fake("ipu::suppress_boxes", _shapes, lib=_library)


def suppress_boxes(
    scores: Tensor,
    boxes: Tensor,
    *,
    threshold: float = 0.5,
    scoreThreshold: float = float(torch.finfo(torch.float32).min),
    numDetections: int = 100,
    sigma: float = 0.0,
    useGather: bool = False,
) -> Results:
    """Take the best pairs of box and class, image by image, without those that they overlap.

    Args:
        scores: `[images, boxes, classes]`.
        boxes: `[images, boxes, 4]`, as x1, y1, x2, y2.
        threshold: an overlap (intersection over union) above it takes a score away.
        scoreThreshold: only scores above it are taken.
        numDetections: how many pairs at most; not more than there are boxes.
        sigma: 0, or scores fall by exp(-overlap**2 / sigma) and are not taken away.
        useGather: a hint for IPUs.

    Returns:
        Numbers of boxes, scores, boxes, classes `[images, numDetections(, 4)]`, and how many were
        taken `[images]`. Unused places have -1, 0, 0 and 2147483647.
    """
    if scores.dim() != 3 or boxes.shape != (*scores.shape[:2], 4):
        raise WrongInputs(
            f"scores are [images, boxes, classes] and boxes [images, boxes, 4], not "
            f"{list(scores.shape)} and {list(boxes.shape)}"
        )
    if not 0 < numDetections <= scores.shape[1]:
        raise WrongInputs(f"numDetections is {numDetections}, of {scores.shape[1]} boxes")
    found: Results = torch.ops.ipu.suppress_boxes(
        scores, boxes, threshold, sigma, scoreThreshold, numDetections
    )
    return found
