"""Check the protocol of a commit, and forms of a step that are still to come."""

import itertools

import pytest
import torch
from torch import nn

from ipu_dynamo import Options, compile_training, identity_loss
from ipu_dynamo.errors import IpuError
from ipu_dynamo.runtime.execute.transaction.commit import TRANSITIONS, Commit, NothingKept

ROWS, STEPS, RATE = 4, 3, 0.1
PHASES = ["complete", "open", "voted", "writing", "pending"]


class Product(nn.Module):
    """A weight and a count of micro-batches. The weight's gradient is the sum of the rows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return identity_loss((x @ self.weight).sum(), "sum")


def executable_of():
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    compiled = compile_training(
        model, optimizer, Options(engine="eager", device_iterations=STEPS, output_mode="every")
    )
    compiled.compile(torch.zeros(STEPS * ROWS, 3))
    return compiled, compiled.executable


def use(executable, form):
    executable._form, executable._commit = form, form.commit


class Stored:
    """A storage of one variable, as far as a commit needs it."""

    def __init__(self):
        self.variable = torch.zeros(3)

    def tensor(self, name, replica=0):
        return self.variable


class Recorder(NothingKept):
    """What a commit asks for."""

    def __init__(self):
        self.asked = []

    def keep(self):
        self.asked.append("keep")

    def guard(self):
        self.asked.append("guard")

    def undo(self, *, written):
        self.asked.append(("undo", written))


def in_phase(phase):
    """A commit in this phase."""
    commit = Commit(Stored(), Recorder())
    if phase == "pending":
        commit.rebind([commit._storage.variable], [torch.ones(3)])
    if phase in ("open", "voted", "writing"):
        commit.open()
    if phase in ("voted", "writing"):
        commit.vote()
    if phase == "writing":
        with pytest.raises(KeyboardInterrupt):
            commit.write(interrupted, 1)
    assert commit.phase == phase
    return commit


def interrupted():
    raise KeyboardInterrupt


EVENTS = {
    "open": lambda commit: commit.open(),
    "vote": lambda commit: commit.vote(),
    "write": lambda commit: commit.write(lambda: None, 1),
    "complete": lambda commit: commit.complete(1),
    "rebind": lambda commit: commit.rebind([commit._storage.variable], [torch.ones(3)]),
}


@pytest.mark.parametrize(("event", "phase"), [*itertools.product(EVENTS, PHASES)])
def test_an_event_is_possible_in_its_phases_only(event, phase):
    commit = in_phase(phase)
    steps = commit.steps
    if phase in TRANSITIONS[event]:
        EVENTS[event](commit)
        after = "complete" if event == "write" else TRANSITIONS[event][phase]
        assert commit.phase == after
        assert commit.steps == steps + (event in ("write", "complete", "rebind"))
    else:
        with pytest.raises(IpuError, match=f"a step that is {phase} cannot {event}"):
            EVENTS[event](commit)
        assert (commit.phase, commit.steps) == (phase, steps)


@pytest.mark.parametrize("phase", PHASES)
def test_settling_undoes_a_step_or_stores_its_values(phase):
    commit = in_phase(phase)
    steps = commit.steps
    for _ in range(2):  # the second one has nothing to do
        commit.settle()
        assert commit.settled
        assert commit.steps == steps == (phase == "pending")
    undone = [entry for entry in commit._undo.asked if entry not in ("keep", "guard")]
    assert undone == (
        [("undo", phase == "writing")] if phase in ("open", "voted", "writing") else []
    )
    assert commit._storage.variable.tolist() == [steps] * 3


class Captured:
    """Steps as a graph of a device makes them: fixed addresses, and one call without Python."""

    def __init__(self, executable, fail=lambda step: None):
        storage = executable._storage
        self.commit, self.fail = Commit(storage, NothingKept()), fail
        self.weight, self.count = storage.tensor("weight"), storage.tensor("count")
        self.rows, self.new = torch.empty(ROWS, 3), torch.empty(3)

    def prepare(self, hyperparameters):
        ((self.rate, *_),) = hyperparameters

    def run(self, steps, streams, observer):
        for step in range(steps):
            self.commit.open()
            self.rows.copy_(streams.received[0][step])
            self.fail(step)
            ones = torch.ones(ROWS)
            torch.addmv(self.weight, self.rows.T, ones, alpha=-self.rate, out=self.new)
            loss = (self.rows @ self.weight).sum()
            self.commit.vote()
            self.commit.write(self.write, 1)
            streams.sent[0][step] = loss

    def write(self):
        self.weight.copy_(self.new)
        self.count.add_(1)

    def plan(self):
        raise NotImplementedError


def test_a_step_of_fixed_addresses_commits_and_rolls_back():
    x = torch.randn(STEPS, ROWS, 3)
    (loop, _), (captured, executable) = executable_of(), executable_of()
    form = Captured(executable)
    use(executable, form)
    torch.testing.assert_close(captured(x.flatten(0, 1)), loop(x.flatten(0, 1)))
    torch.testing.assert_close(captured.model.state_dict(), loop.model.state_dict())
    assert executable.step == STEPS

    def fail(step):
        if step == 1:
            raise KeyboardInterrupt

    form.fail = fail
    with pytest.raises(KeyboardInterrupt):
        captured(x.flatten(0, 1))
    assert executable.step == STEPS + 1
    expected = loop.model.weight - RATE * x[0].sum(0)
    torch.testing.assert_close(captured.model.weight.data, expected.data)
    assert captured.model.count == STEPS + 1
    form.fail = lambda step: None
    captured(x.flatten(0, 1))
    assert executable.step == 2 * STEPS + 1


class OfTwoRanks(Commit):
    """A commit that another rank has to agree to."""

    def vote(self, agreed=True):
        super().vote(agreed and self.other())


def test_a_step_is_undone_where_another_rank_votes_no():
    x = torch.randn(STEPS, ROWS, 3)
    (alone, _), (ours, executable) = executable_of(), executable_of()
    looped, answers = executable._looped, iter([True, False])
    looped.commit = OfTwoRanks(executable._storage, looped.commit._undo)
    looped.commit.other = lambda: next(answers, True)
    use(executable, looped)
    with pytest.raises(IpuError, match="not all of its parts succeeded"):
        ours(x.flatten(0, 1))
    assert executable.step == 1
    assert ours.model.count == 1  # the micro-batches of the second step had counted, too
    torch.testing.assert_close(ours.model.weight.data, 1 - RATE * x[0].sum(0))
    ours(x.flatten(0, 1))
    assert executable.step == STEPS + 1
    alone(torch.cat([x[0], *x[:2]]))
    expected = alone.model.weight.data - RATE * x[2].sum(0)
    torch.testing.assert_close(ours.model.weight.data, expected)
