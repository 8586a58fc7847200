"""Check random numbers: their distributions, and that only seed, step and place decide them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import Block, CompileError, Options, Strategy, compile_inference, compile_training
from ipu_dynamo.testing import assert_same_bits

COUNT = 1 << 14


def draw(model, *inputs, seed=0, engine="eager", **options):
    """What the first call of `model` returns, for the one input that it needs at least."""
    compiled = compile_inference(model, Options(engine=engine, seed=seed, **options))
    return compiled(*(inputs or (torch.zeros(1),)))


def moments(values):
    values = values.double()
    return values.mean().item(), values.std().item()


# --- Distributions -----------------------------------------------------------------------------

CONTINUOUS = {  # draws COUNT numbers; mean, standard deviation, least, largest
    "rand": (lambda x: torch.rand(COUNT), 0.5, 12**-0.5, 0, 1),
    "rand_like": (lambda x: torch.rand_like(x.expand(COUNT)), 0.5, 12**-0.5, 0, 1),
    "rand half": (lambda x: torch.rand(COUNT, dtype=torch.float16), 0.5, 12**-0.5, 0, 1),
    "rand bfloat16": (lambda x: torch.rand(COUNT, dtype=torch.bfloat16), 0.498, 12**-0.5, 0, 1),
    "rand double": (lambda x: torch.rand(COUNT, dtype=torch.float64), 0.5, 12**-0.5, 0, 1),
    "uniform": (lambda x: torch.empty(COUNT).uniform_(-2, 4), 1, 3**0.5, -2, 4),
    "randn": (lambda x: torch.randn(COUNT), 0, 1, -6, 6),
    "randn_like": (lambda x: torch.randn_like(x.expand(COUNT).half()), 0, 1, -6, 6),
    "normal_": (lambda x: torch.empty(COUNT).normal_(3, 0.5), 3, 0.5, 0, 6),
    "normal": (lambda x: torch.normal(2.0, 3.0, (COUNT,)), 2, 3, -16, 20),
    "normal of mean": (lambda x: torch.normal(x.expand(COUNT), 2.0), 0, 2, -12, 12),
    "normal of deviation": (lambda x: torch.normal(1.0, x.expand(COUNT) + 2), 1, 2, -11, 13),
    "normal of both": (lambda x: torch.normal(x.expand(COUNT), x.expand(COUNT) + 1), 0, 1, -6, 6),
    "exponential": (lambda x: torch.empty(COUNT).exponential_(4.0), 0.25, 0.25, 0, 5),
    "log_normal": (
        lambda x: torch.empty(COUNT).log_normal_(0.5, 0.2),
        math.exp(0.52), math.exp(0.52) * math.expm1(0.04) ** 0.5, 0.6, 5,
    ),
    "log of log_normal": (lambda x: torch.empty(COUNT).log_normal_().log(), 1, 2, -11, 13),
    "geometric": (lambda x: torch.empty(COUNT).geometric_(0.4), 2.5, 0.6**0.5 / 0.4, 1, 60),
    "arctan of cauchy": (
        lambda x: ((torch.empty(COUNT).cauchy_(1, 3) - 1) / 3).atan(), 0, math.pi / 12**0.5, -2, 2,
    ),
    "random_": (lambda x: torch.empty(COUNT).random_(5, 100), 52, (95**2 / 12) ** 0.5, 5, 100),
    "random_ to": (lambda x: torch.empty(COUNT).int().random_(7), 3, 2, 0, 7),
    "random_ half": (
        lambda x: torch.empty(COUNT).half().random_(), 1023.5, 2048 / 12**0.5, 0, 2048,
    ),
    "random_ from": (
        lambda x: torch.empty(COUNT).to(torch.uint8).random_(200, None).int(),
        227.5, 56 / 12**0.5, 200, 256,
    ),
    "random_ bool": (lambda x: torch.empty(COUNT).bool().random_().int(), 0.5, 0.5, 0, 2),
    "bernoulli": (lambda x: torch.bernoulli(x.expand(COUNT) + 0.3), 0.3, 0.21**0.5, 0, 1.1),
    "bernoulli p": (lambda x: torch.bernoulli(torch.empty(COUNT), 0.3), 0.3, 0.21**0.5, 0, 1.1),
    "bernoulli_": (lambda x: torch.empty(COUNT).bernoulli_(0.9), 0.9, 0.3, 0, 1.1),
    "randint": (lambda x: torch.randint(-3, 5, (COUNT,)), 0.5, (63 / 12) ** 0.5, -3, 5),
    "randint high": (lambda x: torch.randint(7, (COUNT,)), 3, 2, 0, 7),
    "randint_like": (lambda x: torch.randint_like(x.expand(COUNT), 2, 9), 5, 2, 2, 9),
    "randint real": (lambda x: torch.randint(2, 9, (COUNT,), dtype=torch.float32), 5, 2, 2, 9),
    "randint large": (lambda x: torch.randint(10**9 - 3, 10**9 + 4, (COUNT,)) - 10**9, 0, 2, -3, 4),
    "dropout": (lambda x: F.dropout(x.expand(COUNT) + 1, 0.25), 1, 3**-0.5, 0, 1.4),
    "rrelu": (lambda x: F.rrelu(x.expand(COUNT) - 1, 0.2, 0.4, True), -0.3, 0.2 / 12**0.5, -0.4, 0),
    "multinomial": (
        lambda x: torch.multinomial(x + torch.tensor([[1.0, 2.0, 1.0]]), COUNT, True).flatten(),
        1, 0.5**0.5, 0, 3,
    ),
}  # fmt: skip


@pytest.mark.few(12)
@pytest.mark.parametrize("case", CONTINUOUS.values(), ids=CONTINUOUS)
def test_numbers_have_the_mean_the_deviation_and_the_range(case):
    model, mean, deviation, least, largest = case
    values = draw(model)
    assert values.shape == (COUNT,)
    found_mean, found_deviation = moments(values)
    assert abs(found_mean - mean) < 5 * deviation / COUNT**0.5
    assert abs(found_deviation / deviation - 1) < 0.03
    assert values.min() >= least
    assert values.max() < largest


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
def test_too_many_integers_are_refused(dtype):
    with pytest.raises(CompileError, match="draws among at most"):
        draw(lambda x: torch.empty(8, dtype=dtype).random_())


def test_fractions_are_spread_evenly():
    histogram = torch.histc(draw(lambda x: torch.rand(COUNT)), 64, 0, 1)
    expected = COUNT / 64
    chi_squared = ((histogram - expected) ** 2 / expected).sum().item()
    assert chi_squared < 63 + 5 * math.sqrt(2 * 63)


def test_neighbours_draws_calls_and_micro_batches_are_not_correlated():
    def model(x):
        return torch.rand(COUNT), torch.rand(COUNT)

    compiled = compile_inference(model, Options(engine="eager", seed=3, device_iterations=2))
    results = [*compiled(torch.zeros(2)), *compiled(torch.zeros(2))]
    streams = [part for result in results for part in result.view(2, COUNT)]
    streams += [streams[0].roll(1), streams[0].roll(256)]
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert correlation.abs().max() < 5 / COUNT**0.5


def test_permutation_holds_every_number_once_and_differs_by_seed():
    first, second = (draw(lambda x: torch.randperm(1000), seed=s) for s in (0, 1))
    assert torch.equal(first.sort().values, torch.arange(1000))
    assert not torch.equal(first, second)


def test_sample_without_replacement_has_no_repetitions_and_no_weightless_one():
    weights = torch.ones(200, 10)
    weights[:, 4] = 0
    sample = draw(lambda w: torch.multinomial(w, 9), weights)
    assert {tuple(row) for row in sample.sort(1).values.tolist()} == {(0, 1, 2, 3, 5, 6, 7, 8, 9)}


def test_weightless_element_is_never_drawn_among_very_many():
    """A fraction of exactly zero, as this seed draws, must not win."""
    weights = torch.zeros(64, 1 << 16)
    weights[:, 5] = 1
    compiled = compile_inference(lambda w: torch.multinomial(w, 1), Options(engine="eager", seed=2))
    assert (compiled(weights) == 5).all()


@pytest.mark.parametrize(("p", "kept"), [(0.0, 1.0), (1.0, 0.0), (1e-12, 1.0)])
def test_dropout_at_its_limits(p, kept):
    x = torch.rand(1000)
    assert torch.equal(draw(nn.Dropout(p), x), x * kept)


def test_dropout_is_off_in_eval_mode():
    x = torch.randn(100)
    assert torch.equal(draw(nn.Dropout(0.5).eval(), x), x)


def test_gradient_of_dropout_uses_the_mask_of_the_forward_pass():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self, x):
            kept = F.dropout(self.weight * x, 0.5)
            return F.mse_loss(kept, torch.zeros(1000), reduction="sum"), kept

    model = Model()
    options = Options(engine="eager", seed=0)
    _, kept = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.125), options)(
        torch.ones(1000)
    )
    assert torch.equal(model.weight.detach(), torch.where(kept != 0, 1 - 0.125 * 2 * 2 * 2, 1.0))


def test_random_operators_inside_a_model_train():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x, y):
            h = F.gumbel_softmax(self.lstm(self.layer(x))[0])
            return F.mse_loss(F.alpha_dropout(F.dropout1d(h, 0.1), 0.1, True), y)

    torch.manual_seed(0)
    model = Model()
    options = Options(engine="eager", seed=0)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=1e-6), options)
    x = torch.randn(2, 2, 8)
    losses = [step(x, x).item() for _ in range(3)]
    assert len(set(losses)) == 3
    assert all(math.isfinite(loss) for loss in losses)


def test_model_without_dropout_reads_no_key():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    compiled = compile_inference(layer, {"engine": "eager"})
    compiled.compile(torch.ones(2, 3, 8))
    assert [stream.source for stream in compiled.program.inputs] == ["host"]


def test_unknown_random_operator_is_refused_with_its_line():
    with pytest.raises(CompileError, match=r"no counter-based form[\s\S]*torch.poisson\(x\)"):
        draw(lambda x: torch.poisson(x))


def test_too_large_range_of_integers_is_refused():
    with pytest.raises(CompileError, match=r"a random integer of 16777217 values"):
        draw(lambda x: torch.randint(2**24 + 1, (3,)))


# --- What decides the bits --------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout and noise in two blocks on the given IPUs."""

    def __init__(self, ipus):
        super().__init__()
        self.ipus = ipus

    def forward(self, x):
        with Block("a", self.ipus[0]):
            x = F.dropout(x, 0.3) + torch.rand_like(x)
        with Block("b", self.ipus[1]):
            return F.dropout(x * 2, 0.5) * torch.randint_like(x, 10)


def test_same_seed_gives_the_same_bits_and_another_others():
    model, x = Noisy((0, 0)), torch.randn(8, 16)
    assert_same_bits(draw(model, x, seed=5), draw(model, x, seed=5))
    assert not torch.equal(draw(model, x, seed=5), draw(model, x, seed=6))


def test_seed_is_taken_from_torch_unless_given():
    def run():
        torch.manual_seed(4)
        return draw(Noisy((0, 0)), torch.ones(8, 16), seed=None)

    assert_same_bits(run(), run())


@pytest.mark.parametrize("seed", [-1, 2**64 + 3, 2**31])
def test_any_integer_is_a_seed(seed):
    assert moments(draw(lambda x: torch.rand(COUNT), seed=seed))[0] == pytest.approx(0.5, abs=0.01)


def test_placement_and_schedule_change_no_bit():
    x = torch.randn(24, 16)
    pipelined = Strategy("pipelined")
    one = draw(Noisy((0, 0)), x, device_iterations=3)
    assert_same_bits(one, draw(Noisy((0, 1)), x, device_iterations=3))
    assert_same_bits(one, draw(Noisy((1, 0)), x, device_iterations=3))
    assert_same_bits(one, draw(Noisy((0, 1)), x, device_iterations=3, strategy=pipelined))


@pytest.mark.slow
@pytest.mark.inductor
def test_engine_changes_no_bit():
    def model(x):
        noise = torch.rand_like(x) + torch.randint_like(x, 10) + torch.bernoulli(x)
        return F.dropout(noise, 0.3), torch.randperm(64)

    x = torch.rand(8, 16)
    assert_same_bits(draw(model, x), draw(model, x, engine="inductor"))


def test_every_call_micro_batch_and_replica_draws_others():
    model = nn.Dropout(0.5)
    options = Options(engine="eager", seed=0, device_iterations=2, replicas=2)
    compiled = compile_inference(model, options)
    masks = torch.cat([compiled(torch.ones(4 * 64)).view(4, 64) for _ in range(2)])
    assert len({tuple(mask) for mask in masks.tolist()}) == 8


def test_replicas_that_read_the_same_rows_draw_others():
    options = {"replicas": 2, "input_group_size": 2}
    first, second = draw(nn.Dropout(0.5), torch.ones(64), **options).view(2, 64)
    assert not torch.equal(first, second)


def test_numbers_do_not_depend_on_how_many_micro_batches_a_call_has():
    """The first micro-batch of the first call is the same one."""
    one = draw(nn.Dropout(0.5), torch.ones(64))
    assert_same_bits(one, draw(nn.Dropout(0.5), torch.ones(3 * 64), device_iterations=3)[:64])


def test_numbers_do_not_repeat_between_elements_of_large_tensors():
    values = draw(lambda x: torch.randint(0, 1 << 24, (1 << 18,)))
    expected = (1 << 24) * (1 - math.exp(-(2**18) / 2**24))
    assert abs(values.unique().numel() - expected) < 5 * math.sqrt(2**18 - expected)
