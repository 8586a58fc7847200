"""Check programs that share a model, on ranks that each have a part of its IPUs.

Ranks are threads of this process, with messages in memory.
"""

from dataclasses import replace
from threading import Lock

import pytest
import torch
from torch import nn

from ipu_dynamo import (
    Block,
    Options,
    Strategy,
    compile_inference,
    compile_training,
    identity_loss,
)
from ipu_dynamo.errors import InputError, RankFailed
from ipu_dynamo.testing.rank_threads import run_ranks, transport_here
from ipu_dynamo.whole_step import lowering, ranks

MAKING = Lock()  # torch's generator is one for all threads
OPTIONS = Options("eager", replicas=2, gradient_accumulation=3, strategy=Strategy("pipelined"))
INFERENCE = Options("eager", replicas=2, device_iterations=2, strategy=Strategy("pipelined"))
ALONE = Options("eager", replicas=2, seed=1, strategy=Strategy("sharded"))  # has no mesh
MESHES = [(1, 2), (2, 2)]


class Chain(nn.Module):
    """A layer on each of two IPUs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x):
        with Block("first", ipu_id=0):
            h = self.first(x).tanh()
        with Block("second", ipu_id=1):
            y = self.second(h)
            return y, identity_loss(y.square(), "mean")


class Normed(Chain):
    """A chain with a batch norm on each IPU, whose statistics each replica has for itself."""

    def __init__(self):
        super().__init__()
        self.first.append(nn.BatchNorm1d(4))
        self.second.insert(0, nn.BatchNorm1d(4))


class Rank:
    """A rank that trains; without a transport it is the only process."""

    def __init__(self, transport, options=OPTIONS, make=Chain):
        self.share, self.options = transport and transport.share, options
        with MAKING:
            torch.manual_seed(0)
            self.model = make()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.step = compile_training(self.model, self.optimizer, options)

    def rows(self, call, options, *, training):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(call))
        x = x if training else x[:8]
        return (
            x
            if self.share is None
            else ranks.rows_of_share(x, options, self.share, training=training)
        )

    def train(self, calls):
        for call in calls:
            self.step(self.rows(call, self.options, training=True))

    def weights(self):
        return [tensor.clone() for name, tensor in self.weights_and_buffers()]

    def weights_and_buffers(self):
        self.step.read_weights()
        return [*self.model.state_dict().items()]


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "transport_of", lambda of: transport_here() if of != ALONE else None)


def assert_all_have(found, expected):
    for of_rank in found:
        assert all(map(torch.equal, of_rank, expected))


@pytest.mark.parametrize("mesh", MESHES)
def test_inference_compiled_in_mid_training_takes_the_newest_weights(mesh):
    def run(transport):
        rank = Rank(transport)
        rank.train(range(2))
        infer = compile_inference(rank.model, INFERENCE)
        infer(rank.rows(5, INFERENCE, training=False))
        rank.train(range(2, 4))
        y, _ = infer(rank.rows(6, INFERENCE, training=False))
        return y, rank.weights()

    whole, expected = run(None)
    found = run_ranks(*mesh, run)
    assert_all_have([weights for _, weights in found], expected)
    for rank, (y, _) in enumerate(found):
        own = whole.unflatten(0, (2, 2, 2)).chunk(mesh[0], 1)[rank // mesh[1]]
        assert torch.equal(y, own.flatten(0, 2))


@pytest.mark.few(2)
@pytest.mark.parametrize("mesh", [*MESHES, (2, 1)])
@pytest.mark.parametrize("modes", ["evaluated", "trained"])  # inference changes statistics, too
def test_statistics_of_batch_norms_are_those_of_one_process(mesh, modes):
    def run(transport):
        rank = Rank(transport, make=Normed)
        rank.train(range(2))
        rank.model.train(modes == "trained")
        infer, results = compile_inference(rank.model, INFERENCE), []
        for call in (5, 6):
            rank.model.train(modes == "trained")
            results.append(infer(rank.rows(call, INFERENCE, training=False))[0])
            rank.model.train()
            rank.train([call])
        weights = {name: t.clone() for name, t in rank.weights_and_buffers()}
        replicas = range(2) if rank.share is None else rank.share.replicas(2)
        own = {
            (v.name, replica): step.executable.tensor(v.name, place).clone()
            for step in (rank.step, infer)
            for v in step.executable.host_program.runs.variables
            if v.kind == "buffer"
            for place, replica in enumerate(replicas)
        }
        return results, weights, own

    whole, weights, statistics = run(None)
    for rank, (results, found, own) in enumerate(run_ranks(*mesh, run)):
        for ours, theirs in zip(results, whole, strict=True):
            expected = theirs.unflatten(0, (2, 2, 2)).chunk(mesh[0], 1)[rank // mesh[1]]
            assert torch.equal(ours, expected.flatten(0, 2))
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        assert own
        assert all(torch.equal(value, statistics[key]) for key, value in own.items())


def test_weights_that_rank_0_has_loaded_count_more_than_trained_ones():
    def run(transport):
        rank = Rank(transport)
        rank.train(range(2))
        if transport is None or transport.share.rank == 0:
            rank.model.load_state_dict({n: t + 1 for n, t in Chain().state_dict().items()})
            loaded.extend(t.clone() for t in rank.model.state_dict().values())
        compile_inference(rank.model, INFERENCE).compile(rank.rows(5, INFERENCE, training=False))
        return rank.weights()

    loaded = []
    found = run_ranks(1, 2, run)
    assert_all_have(found, loaded)


def sharing(model, share):
    """A model of which a weight and a bias share memory with those of another one."""
    other = Chain()
    other.second[0].weight = nn.Parameter(share(model.second[0].weight))
    other.second[0].bias = nn.Parameter(share(model.second[0].bias))
    return other


@pytest.mark.parametrize("share", [lambda t: t.data, lambda t: t.data[:]], ids=["data", "view"])
def test_tensors_that_share_memory_are_newer_together(share):
    def run(transport):
        rank, x = Rank(transport), torch.ones(8, 4)
        with MAKING:
            other = sharing(rank.model, share)
        rank.train([0])
        if rank.share.rank == 0:
            with pytest.raises(InputError, match=r"second.0.weight and 1 more .* newer on"):
                compile_inference(other, ALONE)(x)
        compile_inference(other, INFERENCE).compile(rank.rows(5, INFERENCE, training=False))
        tensors = [t.detach().clone() for t in other.second.parameters()]
        rank.weights()
        return tensors, [t.detach().clone() for t in rank.model.second.parameters()]

    for ours, theirs in run_ranks(1, 2, run):
        assert all(map(torch.equal, ours, theirs))


def test_a_program_of_one_rank_refuses_weights_that_another_one_trains():
    def run(transport):
        rank, first = Rank(transport), transport.share.rank == 0
        alone, x = compile_inference(rank.model, ALONE), torch.randn(8, 4)
        for call in range(2):  # the first compiles, the second does not
            rank.train([call])
            if first:
                with pytest.raises(InputError, match=r"second.0.weight and 1 more .* newer on"):
                    alone(x)
            rank.weights()
            if first:
                alone(x)

    run_ranks(1, 2, run)


@pytest.fixture
def broken(monkeypatch):
    """Ranks that cannot bring up the next program."""
    whole, broken = lowering.initial_tensors, set()

    def initial_tensors(*args, **kwargs):
        if transport_here().share.rank in broken:
            broken.remove(transport_here().share.rank)
            raise MemoryError
        return whole(*args, **kwargs)

    monkeypatch.setattr(lowering, "initial_tensors", initial_tensors)
    return broken


class Dropping(Normed):
    """A chain with statistics of each replica, and random numbers."""

    def __init__(self):
        super().__init__()
        self.first.append(nn.Dropout(0.5))


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_program_stays_if_a_rank_could_not_bring_up_another_one(mesh, broken):
    def run(transport, *, fails):
        rank = Rank(transport, replace(OPTIONS, seed=3), Dropping)
        rank.train(range(2))
        if fails and rank.share.rank == 1:
            broken.add(1)
        if fails:
            with pytest.raises((MemoryError, RankFailed)):
                rank.step.compile(rank.rows(0, OPTIONS, training=True).repeat(2, 1))
        rank.train(range(2, 4))
        own = rank.share.replicas(2)
        buffers = [
            rank.step.executable.tensor(v.name, place).clone()
            for v in rank.step.executable.host_program.runs.variables
            if v.kind == "buffer"
            for place in range(len(own))
        ]
        rank.step.read_optimizer_state()
        states = [t.clone() for of in rank.optimizer.state.values() for t in of.values()]
        return [*rank.weights(), *buffers, *states]

    expected = run_ranks(*mesh, lambda transport: run(transport, fails=False))
    found = run_ranks(*mesh, lambda transport: run(transport, fails=True))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_programs_run_after_one_rank_could_not_compile_one(broken):
    broken.add(1)

    def run(transport):
        rank = Rank(transport)
        with pytest.raises((MemoryError, RankFailed)):
            rank.train([0])
        rank.train([0])
        return rank.weights()

    found = run_ranks(1, 2, run)
    assert_all_have(found, run_ranks(1, 2, trained_once)[0])


def trained_once(transport):
    rank = Rank(transport)
    rank.train([0])
    return rank.weights()
