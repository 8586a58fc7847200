"""Check that device iterations of inference shared by several threads are those of one."""

import pytest
import torch
from torch import nn

from ipu_dynamo import ExecutionError, Options, compile_inference
from ipu_dynamo.program.schedule.actions import RunPass
from ipu_dynamo.program.schedule.planning import independent

ITERATIONS = 6


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 192), nn.LayerNorm(64)

    def forward(self, x):
        heads = self.layer(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(*heads.unbind())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def compiled(model, x, **options):
    run = compile_inference(model, Options("eager", device_iterations=ITERATIONS, **options))
    return run, run(x)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("mode", ["all", "sum", "final"])
def test_any_number_of_workers_gives_the_same_bits(mode):
    model, x = Attention().eval(), torch.randn(2 * ITERATIONS, 128, 64)
    results = {}
    for workers in (1, 2, 4, 9, None):
        run, results[workers] = compiled(model, x, workers=workers, output_mode=mode)
        assert len(run.executable.schedule.workers) == min(workers or 2, ITERATIONS)
        assert torch.equal(run(x), results[workers])
        assert torch.equal(results[workers], results[1])
    if mode == "all":
        torch.testing.assert_close(results[1], model(x))
    assert torch.get_num_threads() == 2


def test_each_worker_has_consecutive_micro_batches():
    run, _ = compiled(nn.Linear(4, 4), torch.randn(ITERATIONS, 4), workers=4)
    assert run.executable.schedule.workers == (
        (RunPass(0, 0, 0),),
        (RunPass(0, 0, 1), RunPass(1, 0, 2)),
        (RunPass(0, 0, 3),),
        (RunPass(0, 0, 4), RunPass(1, 0, 5)),
    )
    assert run.executable.schedule.rows == ("worker 0", "worker 1", "worker 2", "worker 3")
    run.executable.schedule.check(run.program)
    assert len(run.schedule.workers) == 1  # the IPU's


@pytest.mark.usefixtures("two_threads")
def test_what_is_too_small_for_threads_has_one():
    run, _ = compiled(nn.Linear(4, 4), torch.randn(ITERATIONS, 4))
    assert len(run.executable.schedule.workers) == 1


def test_iterations_that_leave_something_behind_stay_in_order():
    x = torch.ones(ITERATIONS, 1)
    run, result = compiled(Counting(), x, workers=3)
    assert not independent(run.program)
    assert len(run.executable.schedule.workers) == 1
    assert result.flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_random_numbers_are_the_same_for_any_number_of_workers():
    model, x = nn.Dropout(0.5).train(), torch.ones(ITERATIONS, 50)
    results = [compiled(model, x, workers=workers, seed=3)[1] for workers in (1, 3)]
    assert torch.equal(*results)
    assert 0 < results[0].count_nonzero() < x.numel()


def test_a_failure_reaches_the_caller_and_the_next_call_works():
    def picked(x, index):
        return x[index]

    x, index = torch.randn(3 * ITERATIONS, 2), torch.zeros(ITERATIONS, dtype=torch.long)
    run = compile_inference(picked, Options("eager", device_iterations=ITERATIONS, workers=3))
    expected = run(x, index)
    index[4] = 7
    with pytest.raises(ExecutionError, match="out of bounds"):
        run(x, index)
    index[4] = 0
    assert torch.equal(run(x, index), expected)
