"""Check how calls split into micro-batches, and how returned ones are put together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_dynamo import InputError, Options, compile_inference, compile_training, identity_loss
from ipu_dynamo.program import Input, Output, TensorType
from ipu_dynamo.runtime.execute.host_io.batching import Batching, join, micro_batch_size

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool]
RANGES = (2, 40), (1, 8), (1, 3)  # of width, rows of a micro-batch, micro-batches


def batching(*, iterations=1, accumulation=1, group_of=(0,)):
    return Batching(iterations, accumulation, len(group_of), group_of)


def stream(*shape, dtype=torch.float32):
    return Input("x", TensorType(dtype, shape))


def output(returns, period=1, *, mutates=False):
    return Output("0", TensorType(torch.float32, ()), returns, period, mutates)


# --- Splitting -----------------------------------------------------------------------------------


def test_rows_go_by_iteration_then_step_then_group():
    split = batching(iterations=2, accumulation=3, group_of=(0, 1))
    assert split.splits == 12
    views = split.split(stream(2, 5), torch.arange(120.0).view(24, 5))
    assert [view[0, 0].item() for view in views] == [10.0 * i for i in range(12)]
    assert all(view.shape == (2, 5) for view in views)


def test_micro_batches_are_views():
    rows = torch.zeros(4, 8)
    batching(iterations=2).split(stream(2, 8), rows)[1].fill_(1)
    assert rows[:, 0].tolist() == [0, 0, 1, 1]


@given(data=st.data())
def test_each_micro_batch_begins_at_64_bytes_with_its_strides(data):
    rows, width, count = (data.draw(st.integers(low, 5)) for low in (0, 1, 1))
    memory = torch.randn(8 * 5 * 5 * 5 * 2).to(data.draw(st.sampled_from(DTYPES)))
    strides = [data.draw(st.integers(0, 7)) for _ in range(2)]
    offset = data.draw(st.integers(0, 20))
    tensor = memory.as_strided((count * rows, width), strides, offset)
    split = batching(iterations=count).split(stream(rows, width, dtype=tensor.dtype), tensor)
    for place, part in enumerate(split):
        own = tensor[place * rows : (place + 1) * rows]
        assert part.data_ptr() % 64 == 0
        assert part.shape == own.shape
        assert torch.equal(part, own)
        assert rows == 0 or all(
            part.stride(d) == own.stride(d) for d in range(2) if own.size(d) > 1
        )


class Mixed(nn.Module):
    """Small products, in which PyTorch's libraries look at how their operands lie."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, 3)

    def forward(self, x):
        h = self.up(x).relu()
        weights = (h @ h.T).softmax(-1)
        return identity_loss(self.down(weights @ h).pow(2), "mean")


@given(data=st.data())
def test_no_bit_depends_on_the_place_of_rows_or_on_the_grouping_into_calls(data):
    width, rows, iterations = (data.draw(st.integers(low, high)) for low, high in RANGES)
    offset = data.draw(st.integers(0, 17))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(iterations * rows * width + offset)[offset:].view(iterations * rows, width)
    results = []
    for grouped in (True, False):
        model = Mixed(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = Options("eager", device_iterations=iterations if grouped else 1)
        step = compile_training(model, optimizer, options)
        for part in [x] if grouped else x.clone().chunk(iterations):
            step(part)
        step.read_weights()
        results.append([*model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_tensor_without_rows_is_one_micro_batch():
    assert batching().split(stream(), torch.tensor(3.0))[0] == 3


def test_rows_of_a_micro_batch():
    assert micro_batch_size("x", (12, 3), 4) == 3
    assert micro_batch_size("x", (), 1) == 1


@pytest.mark.parametrize(("shape", "splits"), [((10, 3), 4), ((), 2), ((1,), 2)])
def test_rows_that_do_not_divide_are_refused(shape, splits):
    rows = shape[0] if shape else 1
    message = f"the {rows} rows of input x, of shape .*, do not divide into {splits} micro-batches"
    with pytest.raises(InputError, match=message):
        micro_batch_size("x", shape, splits)


@pytest.mark.parametrize("shape", [(7, 2), (4, 3), (4,), (4, 2, 1)])
def test_other_shape_is_refused(shape):
    message = r"Shape mismatch for x: expected torch.Size\(\[4, 2\]\) but got torch.Size\("
    with pytest.raises(InputError, match=message):
        batching(iterations=2).split(stream(2, 2), torch.zeros(shape))


def test_other_dtype_is_refused():
    message = "Data type mismatch for x: expected torch.float32 but got torch.float64"
    with pytest.raises(InputError, match=message):
        batching().split(stream(2), torch.zeros(2).double())


# --- Putting together ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returns", "period", "kept"),
    [
        ("all", 1, [[1, 1], [1, 1], [1, 1], [1, 1]]),
        ("sum", 1, [[1, 1], [1, 1], [1, 1], [1, 1]]),
        ("every", 2, [[0, 0], [1, 1], [0, 0], [1, 1]]),
        ("every", 4, [[0, 0], [0, 0], [0, 0], [1, 1]]),
        ("final", 1, [[0, 0], [0, 0], [0, 0], [0, 1]]),
        ("once", 1, [[1, 0], [0, 0], [0, 0], [0, 0]]),
    ],
)
def test_kept_micro_batches_follow_the_return_rule(returns, period, kept):
    split = batching(iterations=4, accumulation=2)
    assert split.kept(output(returns, period)) == kept


def test_scalars_are_stacked_and_rows_are_joined():
    two = batching(iterations=2)
    scalars = [torch.tensor(1.0), torch.tensor(2.0)]
    assert join(output("all"), scalars, two).tolist() == [1, 2]
    assert join(output("all"), [torch.ones(2, 3)] * 2, two).shape == (4, 3)
    assert join(output("all"), scalars[:1], batching()).shape == ()


def test_sums_stay_apart_by_replica_and_keep_their_dtype():
    values = [torch.tensor([v], dtype=torch.float16) for v in (1, 10, 2, 20, 3, 30)]
    total = join(output("sum"), values, batching(iterations=3, group_of=(0, 1)))
    assert total.tolist() == [6, 60]
    assert total.dtype == torch.float16
    assert values[0] == 1


def test_changed_input_is_that_of_the_first_replica_of_each_group():
    values = [torch.tensor([v]) for v in range(8)]
    consecutive = batching(iterations=2, group_of=(0, 0, 1, 1))
    assert join(output("all", mutates=True), values, consecutive).tolist() == [0, 2, 4, 6]
    strided = batching(iterations=2, group_of=(0, 1, 0, 1))
    assert join(output("all", mutates=True), values, strided).tolist() == [0, 1, 4, 5]


# --- The table of output shapes and values --------------------------------------------------------

D, A, R, B, C = 4, 3, 2, 2, 5
INFERENCE = [
    ("default", D * R, [0, 1, 2, 3, 4, 5, 6, 7]),
    ("all", D * R, [0, 1, 2, 3, 4, 5, 6, 7]),
    ("every", (D // 2) * R, [2, 3, 6, 7]),
    ("final", R, [6, 7]),
    ("sum", R, [0 + 2 + 4 + 6, 1 + 3 + 5 + 7]),
]
TRAINING = [
    ("default", R, [22, 23]),
    ("all", D * A * R, list(range(24))),
    ("every", (D // 2) * A * R, [*range(6, 12), *range(18, 24)]),
    ("final", R, [22, 23]),
    ("sum", R, [sum(range(0, 24, 2)), sum(range(1, 24, 2))]),
]


def numbered(micro_batches):
    """Rows that hold the number of their micro-batch."""
    numbers = torch.arange(float(micro_batches)).repeat_interleave(B)
    return numbers[:, None].expand(-1, C).contiguous()


def period_of(mode):
    """Every second device iteration, in the mode that has a period."""
    return 2 if mode == "every" else 1


@pytest.mark.parametrize(("mode", "copies", "numbers"), INFERENCE)
def test_inference_returns_what_the_output_mode_says(mode, copies, numbers):
    options = Options("eager", D, replicas=R, output_mode=mode, return_period=period_of(mode))
    run = compile_inference(lambda x: (x, x.mean()), options)
    rows, scalars = run(numbered(D * R))
    assert rows.shape == (copies * B, C)
    assert rows[::B, 0].tolist() == numbers
    assert scalars.shape == (copies,)
    assert scalars.tolist() == numbers


@pytest.mark.parametrize(("mode", "copies", "numbers"), TRAINING)
def test_training_returns_what_the_output_mode_says(mode, copies, numbers):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(C))

        def forward(self, x):
            return identity_loss((x + 0 * self.weight).mean(), "none"), x

    model = Model()
    options = Options("eager", D, A, R, output_mode=mode, return_period=period_of(mode))
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    losses, rows = step(numbered(D * A * R))
    assert losses.shape == (copies,)
    assert losses.tolist() == pytest.approx(numbers)
    assert rows.shape == (copies * B, C)
    assert rows[::B, 0].tolist() == numbers


@pytest.mark.parametrize("mode", ["all", "every", "final", "sum"])
def test_one_micro_batch_comes_back_in_its_own_shape(mode):
    run = compile_inference(lambda x: (x, x.sum()), Options("eager", output_mode=mode))
    rows, scalar = run(torch.ones(2, 3))
    assert rows.shape == (2, 3)
    assert scalar.shape == ()


def test_first_dimension_is_multiplied_whatever_it_means():
    run = compile_inference(lambda x: x.t() @ x, Options("eager", 3))
    assert run(torch.ones(6, 4)).shape == (12, 4)


def test_inputs_may_have_different_numbers_of_rows():
    run = compile_inference(lambda x, y: x.sum() + y.sum(), Options("eager", 2))
    assert run(torch.arange(4.0), torch.arange(2.0)).tolist() == [1 + 0, 5 + 1]


@pytest.mark.parametrize(("orthogonal", "groups"), [(False, [0, 0, 1, 1]), (True, [0, 1, 0, 1])])
def test_replicas_of_an_input_group_read_the_same_rows(orthogonal, groups):
    options = Options(
        "eager", 2, replicas=4, input_group_size=2, input_groups_orthogonal=orthogonal
    )
    rows = compile_inference(lambda x: x * 1, options)(numbered(4))
    assert rows[::B, 0].tolist() == [*groups, *(2 + g for g in groups)]
