"""Check slices whose bounds are values, `t[s : s + n]`: forward, backward, and refusals."""

import copy

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import ipu_dynamo
from ipu_dynamo import CompileError, Options

ROWS, COLUMNS = 6, 7


def moved(x, s):
    start = s.clone()
    start.add_(1)
    return x[start : start + 2]


def written_before(x, s):
    y = x * 1
    y.mul_(2)
    return y[s : s + 3]


def of_elements(x, s):
    places = torch.cat([s, s + 1])
    return x[places[0] : places[0] + 2] + x[places[1] : 2 + places[1]]


FORMS = {  # the last start with which each window lies inside of the tensor
    "window": (lambda x, s: x[s : s + 3], 3),
    "from the left": (lambda x, s: x[s - 0 : s + 1 + 1], 4),
    "number first": (lambda x, s: x[1 + s : 3 + s], 3),
    "blocks": (lambda x, s: x[s * 2 : (s + 1) * 2], 2),
    "affine": (lambda x, s: x[2 * s - s + 1 : s + 4], 2),
    "columns": (lambda x, s: x[:, s : s + 5], 2),
    "two dims": (lambda x, s: x[s : s + 2, s + 1 : s + 4], 3),
    "behind an ellipsis": (lambda x, s: x[..., s : s + 2], 5),
    "next to others": (lambda x, s: x[1, None, s : s + 2], 5),
    "with fixed ones": (lambda x, s: x[1:5:2, s : s + 2], 5),
    "every second": (lambda x, s: x[s : s + 5 : 2], 1),
    "every third": (lambda x, s: x[:, s : s + 6 : 3], 1),
    "cast": (lambda x, s: x[s.int() : s.int() + 2], 4),
    "nothing": (lambda x, s: x[s:s], 6),
    "of elements": (of_elements, 3),
    "moved": (moved, 3),
    "written before": (written_before, 3),
    "of a window": (lambda x, s: x[s : s + 4][s : s + 2], 2),
}


class Cutting(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = FORMS[form][0] if isinstance(form, str) else form
        self.x = nn.Parameter(torch.linspace(-1, 2, ROWS * COLUMNS).view(ROWS, COLUMNS))

    def forward(self, s):
        window = self.form(self.x * 1, s)
        return ipu_dynamo.identity_loss(window.square().sum(), "none"), window


def plainly(model, s, lr=0.1):
    """The window and the trained weight of plain PyTorch."""
    model = copy.deepcopy(model)
    loss, window = model(s)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=lr).step()
    return window.detach(), model.x.detach()


@pytest.mark.few(9)
@pytest.mark.parametrize("form", FORMS)
def test_a_window_and_its_gradient_are_plain_pytorchs(form):
    model = Cutting(form)
    step = ipu_dynamo.compile_training(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Options(engine="eager")
    )
    for start in range(FORMS[form][1], -1, -1):
        s = torch.tensor([start])
        window, weight = plainly(model, s)
        _, found = step(s)
        torch.testing.assert_close(found, window)
        torch.testing.assert_close(model.x.detach(), weight)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("length", "step"), [(2, 1), (4, 3)])
def test_a_window_that_pytorch_makes_shorter_is_an_error_of_the_run(dtype, length, step):
    def forward(x, s):
        return x[s : s + length : step]

    run = ipu_dynamo.compile_inference(forward, Options(engine="eager"))
    x = torch.arange(6.0)
    for start in (*range(-9, 10), torch.iinfo(dtype).max, torch.iinfo(dtype).min):
        s = torch.tensor(start, dtype=dtype)
        expected = forward(x, s)
        if len(expected) == 2:
            assert torch.equal(run(x, s), expected)
        else:
            with pytest.raises(ipu_dynamo.IpuError, match="index out of range"):
                run(x, s)


@pytest.mark.slow
@pytest.mark.inductor
def test_windows_of_compiled_code():
    def form(x, s):
        return x[s : s + 2, s + 1 : s + 5 : 3] * x[s : s + 4 : 2, s * 2 : (s + 1) * 2].sum()

    model = Cutting(form)
    step = ipu_dynamo.compile_training(
        model, torch.optim.SGD(model.parameters(), lr=0.001), Options(engine="inductor")
    )
    for start in (2, 0, 1):
        s = torch.tensor([start])
        window, weight = plainly(model, s, lr=0.001)
        torch.testing.assert_close(step(s)[1], window)
        torch.testing.assert_close(model.x.detach(), weight)
    with pytest.raises(ipu_dynamo.IpuError):
        step(torch.tensor([5]))


def test_a_loop_cuts_at_its_counter():
    def forward(x):
        def body(i, total):
            return i + 1, total + x[i * 2 : (i + 1) * 2]

        return ipu_dynamo.for_loop(3, body, [torch.tensor(0), torch.zeros(2)])[1]

    x = torch.arange(6.0)
    assert torch.equal(ipu_dynamo.compile_inference(forward)(x), torch.tensor([6.0, 9.0]))


def changed_start(x, s):
    start = s.clone()
    view = start.view(())
    stop = view + 2
    start.add_(1)
    return x[view:stop]


def written_window(x, s):
    window = x[s : s + 2]
    window.mul_(2)
    return x


def written_view(x, s):
    row = x[s : s + 2][0]
    row.mul_(2)
    return x


def read_late(x, s):
    y = x * 1
    window = y[s : s + 2]
    y.mul_(2)
    return window


def strided(x, s):
    return x[:, s : s + 2].as_strided((6, 2), (7, 1))


def assigned(x, s):
    y = x * 1
    y[s : s + 2] = 0
    return y


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (lambda x, s: x[s:], "how long a slice is depends"),
        (lambda x, s: x[:s], "how long a slice is depends"),
        (lambda x, s: x[s : 2 * s], "how long a slice is depends"),
        (lambda x, s: x[s : s - 1], "how long a slice is depends"),
        (lambda x, s: x[s : s + s], "how long a slice is depends"),
        (lambda x, s: x[s : s + 4 : s], "how long a slice is depends"),
        (lambda x, s: x[s.to(torch.int8) : s.to(torch.int8) + 2], "how long a slice is depends"),
        (lambda x, s: x[s : s.int() + 2], "how long a slice is depends"),
        (changed_start, "how long a slice is depends"),
        (lambda x, s: x[s : s + 7], "7 elements is longer than dimension 0, which has 6"),
        (written_window, "bounds are tensors is written"),
        (written_view, "bounds are tensors is written"),
        (read_late, "is read after its tensor was written"),
        (strided, "as_strided would read other elements"),
        (assigned, "cannot be assigned to"),
    ],
)
def test_a_slice_of_no_known_length_or_with_writes_is_refused(form, text):
    with pytest.raises(CompileError, match=text) as refused:
        ipu_dynamo.compile_inference(Cutting(form))(torch.tensor([1]))
    assert refused.value.id == "value"
    assert "test_dynamic_slices.py" in str(refused.value)


def test_a_window_may_be_read_before_its_tensor_is_written():
    def forward(x, s):
        y = x * 1
        total = y[s : s + 2].sum()
        y.mul_(2)
        return y + total

    x, s = torch.randn(6), torch.tensor(3)
    torch.testing.assert_close(ipu_dynamo.compile_inference(forward)(x, s), forward(x, s))


SIZE, PLACE = st.integers(0, 2), st.integers(0, 9)
STEPS = {  # what a drawn program does with its tensors xs and starts ss
    "cut": lambda xs, ss, a, b, n: xs.append(xs[a][ss[b] : ss[b] + n + 1]),
    "cut to another": lambda xs, ss, a, b, n: xs.append(xs[a][ss[b] : ss[-1] + n]),
    "cut blocks": lambda xs, ss, a, b, n: xs.append(xs[a][ss[b] * 2 : ss[b] * 2 + 2 * n : 2]),
    "cut columns": lambda xs, ss, a, b, n: xs.append(xs[a][..., ss[b] : ss[b] + n + 1]),
    "write": lambda xs, ss, a, b, n: xs[a].mul_(2),
    "view": lambda xs, ss, a, b, n: xs.append(xs[a][...]),
    "copy": lambda xs, ss, a, b, n: xs.append(xs[a] + 1),
    "start": lambda xs, ss, a, b, n: ss.append(ss[b] + n),
    "times": lambda xs, ss, a, b, n: ss.append(ss[b] * (n + 1)),
    "look at": lambda xs, ss, a, b, n: ss.append(ss[b].reshape(1)[0]),
    "move": lambda xs, ss, a, b, n: ss[b].add_(n),
}


@pytest.mark.examples(40)
@given(drawn=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), PLACE, PLACE, SIZE), max_size=8))
@example([("cut", 0, 0, 1), ("write", 0, 0, 0)])
@example([("cut", 0, 0, 1), ("write", 1, 0, 0)])
@example([("look at", 0, 0, 0), ("start", 0, 1, 2), ("move", 0, 0, 1), ("cut to another", 0, 1, 0)])
def test_a_program_of_slices_and_writes_is_plain_pytorchs_or_refused(drawn):
    def forward(x, s):
        xs, ss = [x * 1], [s * 1]
        for step, a, b, n in drawn:
            STEPS[step](xs, ss, a % len(xs), b % len(ss), n)
        return [x + 0 for x in xs]

    run = ipu_dynamo.compile_inference(forward, Options(engine="eager"))
    x = torch.arange(36.0).view(6, 6)
    for start in (0, 1, 2, -5, 4):
        s = torch.tensor(start)
        try:
            results = run(x, s)
        except ipu_dynamo.IpuError as error:
            assert error.id in ("value", "operator-failed")  # noqa: PT017
            continue
        for found, expected in zip(results, forward(x, s), strict=True):
            assert torch.equal(found, expected)
