"""Check that micro-batches that run side by side make the step that they make in turn."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_dynamo import CompileError, ExecutionError, Options, compile_training
from ipu_dynamo.testing import assert_same_bits

ACCUMULATION, ROWS = 5, 3


class Net(nn.Module):
    """A table that is also the last layer, and dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(7, 6), nn.Linear(6, 6)

    def forward(self, rows, wanted):
        h = F.dropout(self.layer(self.table(rows)).tanh(), 0.3)
        return F.cross_entropy(F.linear(h, self.table.weight), wanted)


def data(seed=0):
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randint(7, (ACCUMULATION * ROWS,), generator=rng)
    return rows, rows.roll(1)


def trained(model, *, engine="eager", calls=2, **options):
    """The model after some steps, its losses, and what ran it."""
    own = copy.deepcopy(model)
    given = {"gradient_accumulation": ACCUMULATION, "seed": 1, "output_mode": "all"} | options
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    step = compile_training(own, optimizer, Options(engine=engine, **given))
    losses = [step(*data(call)) for call in range(calls)]
    return own, losses, step


def assert_same(one, other):
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())
    for a, b in zip(one[1], other[1], strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("workers", [1, 2])
def test_repeated_blocks_that_are_one_function_run_apart_too(workers):
    class Deep(Net):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(
                *(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
            )

    model = Deep()
    whole = trained(model, side_by_side=False, outline=False)
    apart = trained(model, side_by_side=True, outline=True, workers=workers)
    assert len(apart[2].program.calls) > len(apart[2].program.functions) > 1
    assert_same(apart, whole)


def test_attention_without_dropout_draws_no_numbers():
    class Attending(Net):
        def forward(self, rows, wanted):
            h = self.table(rows).view(1, 1, -1, 6)
            h = F.scaled_dot_product_attention(h, h, h).view(-1, 6)
            return F.cross_entropy(self.layer(h)[:, :6], wanted.clamp(max=5))

    model = Attending()
    apart = trained(model, side_by_side=True, workers=2)
    assert_same(apart, trained(model, side_by_side=False))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_results_are_those_of_one_after_the_other(workers):
    model = Net()
    in_turn = trained(model, side_by_side=False)
    apart = trained(model, side_by_side=True, workers=workers)
    assert_same(apart, in_turn)
    assert len(apart[2].executable.schedule.workers) == min(workers, ACCUMULATION)


@pytest.mark.inductor
def test_compiled_results_do_not_depend_on_the_number_of_workers():
    model = Net()
    one, two = (
        trained(model, engine="inductor", side_by_side=True, workers=n, calls=1) for n in (1, 2)
    )
    assert_same(one, two)
    expected = trained(model, side_by_side=False, calls=1)
    for a, b in zip(two[0].parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_failure_stops_all_and_leaves_the_sums_zero():
    model = Net()
    own, _, step = trained(model, side_by_side=True, workers=3, calls=1)
    before = copy.deepcopy(own.state_dict())
    rows, wanted = data(1)
    rows[2 * ROWS] = 7  # no row of the table
    with pytest.raises(ExecutionError) as caught:
        step(rows, wanted)
    assert caught.value.micro_batch == 2
    for a, b in zip(own.state_dict().values(), before.values(), strict=True):
        assert_same_bits(a, b)
    rows[2 * ROWS] = 0
    step(rows, wanted)  # nothing of the failed step is in its sums
    other, _, again = trained(model, side_by_side=True, workers=1, calls=1)
    again(rows, wanted)
    for a, b in zip(own.parameters(), other.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())


def test_what_passes_from_one_micro_batch_to_the_next_is_refused():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

        def forward(self, x):
            return F.mse_loss(self.norm(self.layer(x)), x)

    model = Normed()
    options = Options(gradient_accumulation=2, engine="eager", side_by_side=True)
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    with pytest.raises(CompileError, match="side by side"):
        step.compile(torch.zeros(4, 2))


def test_small_models_and_single_threads_run_in_turn(monkeypatch):
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        _, _, step = trained(Net(), calls=0)
        step.compile(*data())
        assert len(step.executable.schedule.workers) == 1


def test_large_micro_batches_get_workers(monkeypatch):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return F.mse_loss(self.layer(x), x)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = Wide()
    options = Options(gradient_accumulation=4, engine="eager")
    step = compile_training(model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    step.compile(torch.zeros(4 * 8192, 64))
    assert len(step.executable.schedule.workers) == 2
