"""Check that values which autograd has kept may change in place, as in PopTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import Options, compile_training, identity_loss

ROWS = 6


class Model(nn.Module):
    """Layers around what a case does, in place or not, to the values between them."""

    def __init__(self, case):
        super().__init__()
        self.case, self.in_place = case, True
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        loss = self.case(self, self.first(x), self.in_place)
        return identity_loss(loss, "none") if self.in_place else loss


def scaled_and_shifted(model, x, in_place):
    h = x.relu()
    if in_place:
        h *= torch.arange(6) * 0.1
        h += 1
    else:
        h = h * (torch.arange(6) * 0.1) + 1
    return model.last(h).square().mean()


def through_views(model, x, in_place):
    """What is written to one view is seen in the others, made before."""
    h = x.exp()
    part, turned = h[:, :3], h.t()
    if in_place:
        part.mul_(2)
        h[:, 5] = 0
    else:
        h = torch.cat([part * 2, h[:, 3:5], torch.zeros_like(h[:, 5:])], 1)
        part, turned = h[:, :3], h.t()
    return model.last(turned.t()).square().mean() + part.sum()


def behind_a_copy(model, x, in_place):
    """What was copied or computed before does not change."""
    h = x.sigmoid()
    turned, squares = h.t().contiguous(), h * h
    h = h.clamp_(max=0.5) if in_place else h.clamp(max=0.5)
    return model.last(h).square().mean() + turned.sum() + squares.mean()


def halves_of_one(model, x, in_place):
    h = x.tanh()
    left, right = h[:, :3], h[:, 3:]
    if in_place:
        left.add_(right)
        right.sub_(left)
    else:
        left = left + right
        right = right - left
        h = torch.cat([left, right], 1)
    model.seen.mul_(0.5).add_(h.detach().sum(0))
    return model.last(h).square().mean() + (left * right).sum()


def without_gradients(model, x, in_place):
    """A change that autograd does not follow: the gradient is that of the value before."""
    h = x.exp()
    if in_place:
        with torch.no_grad():
            h.mul_(0.5)
    else:
        h = h + (0.5 * h - h).detach()
    return model.last(h).square().mean()


def a_sum_into_what_softmax_kept(model, x, in_place):
    h, r = x.relu(), x.softmax(-1)
    if in_place:
        h = F.dropout(h, 0.0, True, inplace=True)
        r += h
        r[:, 0] *= 3
    else:
        r = r + h
        r = torch.cat([r[:, :1] * 3, r[:, 1:]], 1)
    return model.last(r * r).exp().mean()


def turned_in_place(model, x, in_place):
    """What is turned in place stays turned, and reads what is written later."""
    kept = x.exp()
    h = kept.view(-1, 2, 3)
    if in_place:
        h.transpose_(1, 2)
        kept.mul_(0.5)
    else:
        h = (kept * 0.5).view(-1, 2, 3).transpose(1, 2)
    return model.last(h.transpose(1, 2).reshape(-1, 6)).square().mean()


def turned_itself(model, x, in_place):
    """What has made the memory is turned, and not a view of it."""
    h = x.exp()
    column = h[:, 0]
    if in_place:
        h.t_()
        h.mul_(0.5)
    else:
        h = h.t() * 0.5
        column = h[0]
    return model.last(h).square().mean() + column.sum()


def through_what_returns_its_argument(model, x, in_place):
    """No schema says that these look at the memory of what they are given."""
    h = x.relu()
    turned, same = torch.einsum("ij->ji", h), F.dropout2d(h, 0.5, False)
    if in_place:
        h *= torch.arange(6) * 0.1
    else:
        h = h * (torch.arange(6) * 0.1)
        turned, same = h.t(), h
    return model.last(h).square().mean() + turned[0].sum() + model.last(same * same).mean()


CASES = (
    turned_itself,
    through_what_returns_its_argument,
    turned_in_place,
    scaled_and_shifted,
    through_views,
    behind_a_copy,
    halves_of_one,
    without_gradients,
    a_sum_into_what_softmax_kept,
)


@pytest.mark.few(5)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_change_in_place_trains_as_a_new_value_does(case, recwarn):
    torch.manual_seed(0)
    model = Model(case).double()
    plain = copy.deepcopy(model)
    plain.in_place = False
    run = compile_training(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Options(engine="eager")
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(ROWS, 4, dtype=torch.float64)
        optimizer.zero_grad()
        expected = plain(x)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(run(x), expected.detach())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)
    assert not [warning for warning in recwarn if "Error detected" in str(warning.message)]
