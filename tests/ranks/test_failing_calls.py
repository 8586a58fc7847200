"""Check that a call which fails on one rank fails on all, harms nothing, and that the next works.

Ranks are threads of this process, with messages in memory.
"""

import signal
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock

import pytest
import torch
from torch import nn

from ipu_dynamo import Block, Options, Strategy, compile_inference, compile_training, identity_loss
from ipu_dynamo.errors import (
    ExecutionError,
    InputError,
    RankFailed,
    RankLost,
    RanksDiffer,
    UpdateError,
)
from ipu_dynamo.runtime.execute.step_end import StepEnd
from ipu_dynamo.runtime.execute.tasks.rank_streams import RankStreams
from ipu_dynamo.runtime.execute.transaction import rank_vote
from ipu_dynamo.runtime.execute.transaction.rank_vote import RankCall
from ipu_dynamo.runtime.execute.transaction.user_writes import WeightsInCommon
from ipu_dynamo.testing.rank_threads import run_failing_ranks, run_ranks, transport_here
from ipu_dynamo.whole_step import ranks

MAKING = Lock()  # torch's generator is one for all threads
MESHES = [*(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((2, 1), (1, 2))), (2, 2)]


class Picked(nn.Module):
    """Two layers, each on an IPU; an index that is too large fails on the second."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, index):
        with Block("first", ipu_id=0):
            h = self.first(x).tanh()
        with Block("second", ipu_id=1):
            y = self.second(h).gather(1, index)
            return y, identity_loss(y, "mean")


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "transport_of", lambda _: transport_here())


@dataclass
class Rank:
    """A rank that trains."""

    transport: object
    options: Options

    def __post_init__(self):
        with MAKING:
            torch.manual_seed(0)
            self.model = Picked()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.share = self.transport.share
        self.step = compile_training(self.model, self.optimizer, self.options)

    def data(self, call):
        drawn = torch.Generator().manual_seed(call)
        rows = 2 * self.options.device_iterations * self.options.gradient_accumulation
        rows *= self.options.replicas
        whole = torch.randn(rows, 4, generator=drawn), torch.zeros(rows, 1, dtype=torch.int64)
        return [ranks.rows_of_share(x, self.options, self.share, training=True) for x in whole]

    def tensors(self):
        self.step.read_weights()
        self.step.read_optimizer_state()
        named = dict(self.model.state_dict())
        for number, state in enumerate(self.optimizer.state.values()):
            named |= {f"{name} {number}": tensor for name, tensor in state.items()}
        return {name: tensor.clone() for name, tensor in named.items()}


def trained(mesh, fails=None, **options):
    """Four calls; `fails` makes one more between two of them. Each rank's results and tensors."""
    rows, columns = mesh
    given = {"strategy": Strategy("pipelined"), "gradient_accumulation": 3} | options
    options = Options("eager", replicas=2, workers=1, **given)

    def run(transport):
        rank, results = Rank(transport, options), []
        for call in range(4):
            if call == 2 and fails is not None:
                fails(rank)
            results.append(rank.step(*rank.data(call)))
        return results, rank.tensors()

    found = run_ranks(rows, columns, run)
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("wire ") for name in names)
    return found


def assert_harmless(mesh, fails, **options):
    """A call in between that fails changes no bit of the others."""
    for (results, tensors), (expected, whole) in zip(
        trained(mesh, fails, **options), trained(mesh, **options), strict=True
    ):
        for one, other in zip(results, expected, strict=True):
            assert all(map(torch.equal, one, other))
        assert all(torch.equal(tensors[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_an_operator_that_fails_on_a_rank_is_the_error_of_all(mesh, micro_batch):
    def fails(rank):
        x, index = rank.data(9)
        if rank.share.row == 0:
            index[2 * micro_batch * len(rank.share.replicas(2))] = 99
        with pytest.raises(ExecutionError, match="index 99 is out of bounds") as caught:
            rank.step(x, index)
        assert caught.value.rank == rank.share.columns - 1  # has the second IPU of replica 0
        assert caught.value.micro_batch == 2 * micro_batch
        assert "gather" in caught.value.where

    assert_harmless(mesh, fails)


@pytest.mark.parametrize("mesh", MESHES)
def test_an_argument_that_does_not_fit_is_the_error_of_all(mesh):
    def fails(rank):
        x, index = rank.data(9)
        with pytest.raises(InputError) as caught:
            rank.step(x if rank.share.rank else x[:-1], index)
        assert caught.value.rank == 0

    assert_harmless(mesh, fails)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("method", ["prepare", "_exchange"])
def test_an_interrupt_is_that_of_its_rank_and_a_failure_elsewhere(monkeypatch, error, method):
    whole, broken = getattr(StepEnd, method), set()

    def breaks(end, *args, **settings):
        if (transport := transport_here()) is not None and transport in broken and end.commits:
            broken.remove(transport)
            raise error
        return whole(end, *args, **settings)

    monkeypatch.setattr(StepEnd, method, breaks)

    def fails(rank):
        if rank.share.rank == 1:
            broken.add(rank.transport)
        with pytest.raises((error, RankFailed)) as caught:
            rank.step(*rank.data(9))
        if rank.share.rank == 1:
            assert caught.type is error
        else:
            assert (caught.type, caught.value.rank) == (RankFailed, 1)

    assert_harmless((2, 1), fails)
    assert not broken


@pytest.mark.parametrize("iteration", [0, 1])
def test_a_callback_that_raises_ends_the_call_behind_complete_steps(iteration):
    """Of two steps: the first is complete, and the second undone; or both are complete."""
    options = Options("eager", replicas=2, device_iterations=2, workers=1)

    def run(transport):
        rank = Rank(transport, options)
        rank.step(*rank.data(0))

        def on_send(number, _):
            if rank.share.rank == 1 and number == iteration:
                raise KeyError("of a callback")

        try:
            rank.step(*rank.data(1), on_send=on_send)
            ended = None
        except Exception as error:
            ended = type(error)
        steps = rank.step.executable.step
        rank.step(*rank.data(2))
        return ended, steps, rank.tensors()

    (first, *one), (second, *other) = run_ranks(2, 1, run)
    assert [first, second] == [RankFailed if iteration == 0 else None, KeyError]
    assert one[0] == other[0] == 3 + iteration
    assert all(map(torch.equal, one[1].values(), other[1].values()))


def test_a_learning_rate_of_one_rank_is_named():
    def fails(rank):
        group = rank.optimizer.param_groups[0]
        group["lr"] = 0.5 if rank.share.rank == 1 else 0.01
        with pytest.raises(RanksDiffer, match="lr of parameter group 0") as caught:
            rank.step(*rank.data(9))
        assert caught.value.values == {0: "0.01", 1: "0.5"}
        group["lr"] = 0.01

    assert_harmless((2, 1), fails)


def test_a_random_state_of_one_rank_is_named():
    def fails(rank):
        seed, step = rank.step.random_state
        rank.step.set_random_state(seed + rank.share.rank, step)
        with pytest.raises(RanksDiffer, match=r"random states \(seed, step\)") as caught:
            rank.step(*rank.data(9))
        assert caught.value.values == {n: str((seed + n, step)) for n in range(2)}
        rank.step.set_random_state(seed, step)

    assert_harmless((2, 1), fails, seed=5)


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_ranks_of_a_row_that_pass_different_rows_are_named(mesh):
    def fails(rank):
        x, index = rank.data(9)
        with pytest.raises(RanksDiffer, match="arguments") as caught:
            rank.step(x + (rank.share.rank == 1), index)
        assert [*caught.value.values] == [0, 1]

    assert_harmless(mesh, fails)


@pytest.mark.parametrize("ranks_that_set", [{1}, {0, 1}])
def test_a_loss_scale_that_differs_is_named(ranks_that_set):
    def sets(rank):
        number = rank.share.rank
        if number in ranks_that_set:
            rank.step.set_loss_scale(8.0 + number)
        for _ in range(2):  # until it is set anew
            with pytest.raises(RanksDiffer, match=r"ranks have different \.loss_scale"):
                rank.step(*rank.data(9))
        rank.step.set_loss_scale(4.0)

    assert_harmless((2, 1), sets, loss_scale=4.0, loss_scale_is_variable=True)


def test_weights_that_each_rank_writes_otherwise_are_named():
    def fails(rank):
        bias = rank.model.first.bias.detach()
        before = bias.clone()
        bias.copy_(before + rank.share.rank)
        with pytest.raises(RanksDiffer, match=r"first\.bias"):
            rank.step(*rank.data(9))
        bias.copy_(before)

    assert_harmless((2, 1), fails)


@pytest.mark.parametrize("mesh", MESHES[::2])
def test_a_weight_that_one_rank_writes_is_named(mesh):
    def fails(rank):
        bias = rank.model.first.bias.detach()
        before = bias.clone()
        if rank.share.rank == 0:
            bias.copy_(before + 1)
        with pytest.raises(RanksDiffer, match=r"first\.bias") as caught:
            rank.step(*rank.data(9))
        assert [*caught.value.values] == [0, rank.share.columns]
        if rank.share.rank == 0:
            bias.copy_(before)

    assert_harmless(mesh, fails)


def broken_update(monkeypatch):
    """Ranks whose next update fails after it has written a part."""
    whole, broken = StepEnd.write, set()

    def write(end, *timed):
        whole(end, *timed)
        if transport_here() in broken:
            broken.remove(transport_here())
            raise RuntimeError("no more memory")

    monkeypatch.setattr(StepEnd, "write", write)
    return broken


def test_a_guarded_update_that_fails_is_undone_on_all(monkeypatch):
    broken = broken_update(monkeypatch)

    def fails(rank):
        if rank.share.rank == 1:
            broken.add(rank.transport)
        with pytest.raises(UpdateError, match="its step is undone"):
            rank.step(*rank.data(9))

    assert_harmless((2, 1), fails, guard_updates=True)


def test_an_update_that_fails_is_the_error_of_later_calls_until_weights_are_written(monkeypatch):
    broken = broken_update(monkeypatch)

    def fails(rank):
        state = rank.tensors(), rank.optimizer.state_dict()
        weights = {name: state[0][name] for name in rank.model.state_dict()}
        if rank.share.rank == 1:
            broken.add(rank.transport)
            with pytest.raises(UpdateError):
                rank.step(*rank.data(9))
        else:
            rank.step(*rank.data(9))
        for _ in range(2):
            with pytest.raises(UpdateError, match="an update failed") as caught:
                rank.step(*rank.data(9))
            assert caught.value.rank == 1
        rank.model.load_state_dict(weights)
        rank.step.write_weights()
        rank.optimizer.load_state_dict(state[1])
        rank.step.write_optimizer_state()

    (_, one), (_, other) = trained((2, 1), fails)
    assert all(map(torch.equal, one.values(), other.values()))


def test_inference_on_a_row_fails_together():
    options = Options("eager", strategy=Strategy("pipelined"), device_iterations=3)

    def run(transport):
        with MAKING:
            torch.manual_seed(0)
            model = Picked()
        step = compile_inference(model, options)
        x, index = torch.ones(6, 4), torch.zeros(6, 1, dtype=torch.int64)
        first = step(x, index)
        with pytest.raises(ExecutionError):
            step(x, index + 99)
        with pytest.raises(InputError):
            step(x, index) if transport.share.rank else step(x[:-1], index)
        again = step(x, index)
        return all(map(torch.equal, first, again))

    assert run_ranks(1, 2, run) == [True, True]


def test_a_rank_that_is_gone_is_an_error_of_all_others():
    options = Options("eager", replicas=2, workers=1)

    def run(transport):
        rank = Rank(transport, options)
        rank.step(*rank.data(0))
        if rank.share.rank == 1:
            raise SystemExit
        rank.step(*rank.data(1))

    outcomes = run_failing_ranks(2, 1, run)
    assert [type(outcome) for outcome in outcomes] == [RankLost, SystemExit]


def test_an_interrupt_stays_one_if_another_rank_has_left(monkeypatch):
    whole, left = StepEnd.prepare, set()

    def prepare(end, *arguments):
        if transport_here() in left:
            raise KeyboardInterrupt
        whole(end, *arguments)

    monkeypatch.setattr(StepEnd, "prepare", prepare)

    def run(transport):
        rank = Rank(transport, Options("eager", replicas=2, workers=1))
        rank.step(*rank.data(0))
        if rank.share.rank == 0:
            left.add(transport)
            rank.step(*rank.data(1))

    outcomes = run_failing_ranks(2, 1, run)
    assert [type(outcome) for outcome in outcomes] == [KeyboardInterrupt, type(None)]


class NoStreams:
    """Streams to no rank, whose transport notes that it was abandoned."""

    number, transport = 0, None
    unbroken = RankStreams.unbroken

    def __init__(self):
        self.transport = self

    def abandon(self, problem):
        return RankLost(problem)

    def begin(self, streams):
        """No message."""

    def end(self):
        """No message."""


@pytest.mark.parametrize("interrupts", [0, 1, 2])
def test_an_interrupt_waits_from_the_vote_to_the_end_of_the_update_and_a_second_does_not(
    monkeypatch, interrupts
):
    def interrupted_vote(*_):
        for _ in range(interrupts):
            signal.raise_signal(signal.SIGINT)
        return []

    monkeypatch.setattr(rank_vote, "vote", interrupted_vote)
    call, written = RankCall(NoStreams(), None, WeightsInCommon({}), ()), []
    call.open(1)
    call.begin()
    error = (None, KeyboardInterrupt, RankLost)[interrupts]
    with pytest.raises(error) if error else nullcontext(), call.deciding():
        written.append("the step")
    assert written == ([] if interrupts == 2 else ["the step"])
