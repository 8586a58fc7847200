"""Check the custom operators that are there from the start."""

import pytest
import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo import CompileError, Options, custom_operator


def compiled(function):
    return ipu_dynamo.compile_inference(function, Options(engine="eager"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int16])
def test_gathering_along_the_last_dimension_gathers_and_its_gradient_adds(dtype, index_dtype):
    index = torch.tensor([[0, 0, 2], [1, 1, 1]], dtype=index_dtype)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.data = nn.Parameter(torch.randn(2, 4).to(dtype))

        def forward(self, index):
            (out,) = custom_operator(
                [self.data, index], "FastGatherLastDim", "poptorch.custom_ops", 1,
                attributes={"axis": -1},
            )  # fmt: skip
            return out, out.float().sum()

    model = Model()
    before = model.data.detach().clone()
    step = ipu_dynamo.compile_training(
        model, torch.optim.SGD(model.parameters(), lr=1.0), Options(engine="eager"), loss=1
    )
    out, _ = step(index)
    assert torch.equal(out, before.gather(1, index.long()))
    counts = torch.tensor([[2, 0, 1, 0], [0, 3, 0, 0]], dtype=dtype)
    assert torch.allclose(model.data, before - counts, atol=1e-2)


def test_gathering_along_the_last_dimension_refuses_other_shapes():
    with pytest.raises(CompileError, match="differ in more than the last dimension"):
        custom_operator(
            [torch.ones(2, 3), torch.ones(3, 3, dtype=torch.int32)],
            "FastGatherLastDim", "poptorch.custom_ops", 1,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["RemapCE", "CopyTensor"])
def test_identities_are_identities(name):
    x = torch.randn(3)
    attributes = {"fwd_grain_size": 8, "debug_str": "here"}
    found = compiled(
        lambda x: custom_operator([x], name, "ai.graphcore", 1, attributes=attributes)[0]
    )(x)
    assert torch.equal(found, x)


@pytest.mark.parametrize("reduction", ["Sum", "Mean", "NoReduction"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_ctc_operator_gives_the_loss_and_the_gradient_of_each_sequence(reduction, dtype):
    torch.manual_seed(0)
    log_probs = torch.randn(6, 3, 4).log_softmax(2).to(dtype)
    targets, times, lengths = (
        torch.tensor([[1, 2, 3], [2, 2, 0], [3, 0, 0]], dtype=torch.int32),
        torch.tensor([6, 5, 4], dtype=torch.int32),
        torch.tensor([3, 2, 0], dtype=torch.int32),
    )
    loss, gradient = compiled(
        lambda *inputs: tuple(
            custom_operator(
                inputs, "Ctc", "ai.graphcore", 1,
                attributes={"reduction": reduction, "blank": 0, "outDataType": "FLOAT",
                            "enableReducedClassesInLabel": 0},
            )
        )
    )(log_probs, targets, times, lengths)  # fmt: skip
    wanted = log_probs.detach().double().requires_grad_()
    each = nn.functional.ctc_loss(
        wanted, targets.long(), times.long(), lengths.long(), reduction="none"
    )
    each.sum().backward()
    expected = {
        "Sum": each.sum(),
        "Mean": (each / lengths.clamp_min(1)).mean(),
        "NoReduction": each,
    }[reduction]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    assert torch.allclose(loss.double(), expected.detach(), atol=tolerance)
    assert torch.allclose(gradient.double(), wanted.grad, atol=tolerance)


def by_the_book(scores, boxes, threshold=0.5, least=-1e38, count=100,
                sigma=0.0):  # fmt: skip
    """The same for one image, in plain Python."""
    left = {(b, c): float(s) for b, row in enumerate(scores) for c, s in enumerate(row)}

    def overlap(a, b):
        sides = [min(a[i + 2], b[i + 2]) - max(a[i], b[i]) for i in (0, 1)]
        common = max(sides[0], 0) * max(sides[1], 0)
        areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
        return common / (sum(areas) - common)

    taken = []
    while left and len(taken) < count:
        best = max(left, key=lambda pair: (left[pair], -pair[0], -pair[1]))
        if left[best] <= least:
            break
        taken.append((best[0], left.pop(best), best[1]))
        for pair in [p for p in left if p[1] == best[1]]:
            common = overlap(boxes[pair[0]].tolist(), boxes[best[0]].tolist())
            if sigma and left[pair] > least:
                left[pair] *= torch.tensor(-(common**2) / sigma).exp().item()
            elif not sigma and common > threshold:
                del left[pair]
    return taken


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_suppression_takes_the_pairs_that_the_plain_loop_takes(sigma):
    torch.manual_seed(1)
    begin = torch.rand(3, 12, 2)
    boxes = torch.cat([begin, begin + 0.1 + torch.rand(3, 12, 2)], 2)
    scores = torch.rand(3, 12, 2).mul(10).round().div(10)  # many are equal
    scores[2] = -1.0  # none above the limit
    attributes = {"threshold": 0.4, "scoreThreshold": 0.15, "numDetections": 9, "sigma": sigma}
    indices, kept, places, classes, lengths = compiled(
        lambda *x: tuple(custom_operator(x, "Nms", "ai.graphcore", 1, attributes=attributes))
    )(scores, boxes)
    for image in range(3):
        wanted = by_the_book(scores[image], boxes[image], 0.4, 0.15, 9, sigma)
        count = len(wanted)
        assert lengths[image] == count
        assert indices[image, :count].tolist() == [box for box, _, _ in wanted]
        assert classes[image, :count].tolist() == [label for _, _, label in wanted]
        assert kept[image, :count].tolist() == pytest.approx([score for _, score, _ in wanted])
        assert torch.equal(places[image, :count], boxes[image, indices[image, :count].long()])
        assert (indices[image, count:] == -1).all()
        assert (classes[image, count:] == 2147483647).all()
        assert not kept[image, count:].any()
        assert not places[image, count:].any()
    assert lengths[2] == 0
