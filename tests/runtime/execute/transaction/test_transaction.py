"""Check that a step is undone or complete, wherever an error or a signal meets it."""

import threading
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ipu_dynamo import BeginBlock, Options, Strategy, compile_training
from ipu_dynamo.errors import IpuError, UpdateError
from ipu_dynamo.runtime.execute.host_io.transfer_times import TransferTimes
from ipu_dynamo.runtime.execute.tasks import workers
from ipu_dynamo.runtime.execute.timeline import Timeline
from ipu_dynamo.tune.intra_op import intra_op_threads
from tests.poptorch.executor.interrupted_executors import (
    DestroyedExecutors,
    NestedExecutors,
    TrainingBesideAnother,
)
from tests.runtime.execute.faults import RUNTIME, Failure, Interrupt, Line, Tracer, traced

ROWS = 24  # of every call


class Net(nn.Module):
    """Two layers, with statistics between them if wanted."""

    def __init__(self, stages: int, statistics: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(3) if statistics else nn.Identity()
        if stages == 2:
            BeginBlock(self.a, ipu_id=0)
            BeginBlock(self.b, ipu_id=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.b(torch.tanh(self.norm(self.a(x)))), x[:, :2])


class Case(NamedTuple):
    """How a step runs.

    With `on_send` the call that is interrupted reports its iterations. With `decays` the other
    calls have a weight decay, which leads to another fused function. An `observed` step records its
    tasks and transfers.
    """

    stages: int = 1
    statistics: bool = True
    adam: bool = False
    fused: bool = False
    guard: bool = False
    on_send: bool = False
    decays: bool = False
    on_host: bool = False
    observed: bool = False
    more: tuple[tuple[str, object], ...] = ()

    def compiled(self, **changed: object):
        """A compiled step, and with other options if given."""
        torch.manual_seed(0)
        model = Net(self.stages, self.statistics)
        groups = [{"params": [*model.a.parameters()]}, {"params": [*model.b.parameters()]}]
        kind, numbers = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
        if self.adam:
            kind, numbers = torch.optim.Adam, {"lr": 0.01}
        options: dict = {"engine": "eager", "guard_updates": self.guard} | dict(self.more)
        if self.fused:
            options |= {"force": {"FuseStep": True}}
        if self.stages == 2:
            options = {"strategy": Strategy("pipelined"), "workers": 2} | options
        update = "host" if self.on_host else "program"
        options |= changed
        return compile_training(model, kind(groups, **numbers), Options(**options), update=update)


FACADE = {
    "threads in the façade": TrainingBesideAnother,
    "executors of nested modules": NestedExecutors,
    "destroyed executors of nested modules": DestroyedExecutors,
}
CASES = {
    "sequential": Case(more=(("gradient_accumulation", 3),)),
    "guarded": Case(guard=True, more=(("gradient_accumulation", 2),)),
    "pipelined": Case(2, adam=True, guard=True, more=(("gradient_accumulation", 3),)),
    "fused": Case(statistics=False, adam=True, fused=True, more=(("device_iterations", 2),)),
    "reporting": Case(on_send=True, more=(("gradient_accumulation", 2), ("device_iterations", 2))),
    "observed": Case(2, observed=True, on_send=True, more=(("gradient_accumulation", 3),)),
    "observed, fused": Case(
        statistics=False, fused=True, observed=True, on_send=True, more=(("device_iterations", 2),)
    ),
    "two fused functions": Case(statistics=False, fused=True, decays=True),
    "optimiser on the host": Case(
        on_host=True, adam=True, more=(("gradient_accumulation", 2), ("device_iterations", 2))
    ),
}
MORE = {
    "replicas": Case(2, more=(("gradient_accumulation", 3), ("replicas", 2), ("workers", 4))),
    "guarded replicas": Case(
        2, guard=True, adam=True, more=(("gradient_accumulation", 3), ("replicas", 2))
    ),
    "side by side": Case(
        statistics=False,
        more=(("gradient_accumulation", 3), ("side_by_side", True), ("workers", 2)),
    ),
}


class Subject:
    """A compiled step whose whole state can be read and set.

    Attributes:
        base: the state after a first call.
        expected: what the call after the next one returns and leaves, by how many steps of the
            next one are complete: as a fresh executable does that has the state after these.
        most: steps of a call.
    """

    folders = RUNTIME

    def __init__(self, case: Case) -> None:
        self.case, self.compiled = case, case.compiled()
        self.data = [
            torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
        ]
        self.step(self.compiled, self.data[1])
        self.executable = self.compiled.executable
        assert bool(self.executable.fused) == case.fused
        if case.observed:
            self.executable.timeline, self.executable.transfers = Timeline(), TransferTimes()
        self.base = self.state()
        self.most = steps = self.executable._rounds
        single, fresh = case.compiled(device_iterations=1), case.compiled()
        parts = self.data[0].chunk(steps)
        if case.on_host:  # an optimiser of Python makes its states in its first step
            single(parts[0]), fresh(self.data[1])
        single.compile(parts[0])
        fresh.compile(self.data[1])
        write(single, self.base)
        self.expected = {}
        for complete in range(steps + 1):
            write(fresh, state_of(single))
            returned = self.step(fresh, self.data[1])
            self.expected[complete] = [returned, *state_of(fresh)]
            if complete < steps:
                self.step(single, parts[complete], interrupted=True)
        if case.decays:
            self.call()  # compiles the other function

    @property
    def steps(self) -> int:
        """Complete steps of all calls."""
        return self.executable.step * self.most // self.executable.batching.iterations

    @property
    def phase(self) -> str:
        """What the step that runs is about to do."""
        return self.executable._commit.phase

    @property
    def lost_in_commit(self) -> bool:
        """Whether a fault in a commit leaves a part of an update."""
        return not self.case.guard

    def close(self) -> None:
        """End what runs beside."""

    def step(self, compiled, data: Tensor, *, interrupted: bool = False) -> Tensor:
        """Make the call that is interrupted, or another one."""
        if self.case.decays:
            for group in compiled._link.optimizer.param_groups:
                group["weight_decay"] = 0.0 if interrupted else 0.1
        if self.case.on_send and interrupted:
            return compiled(data, on_send=lambda iteration, results: None)
        return compiled(data)

    def call(self) -> None:
        self.step(self.compiled, self.data[0], interrupted=True)

    def next(self) -> list[Tensor]:
        """What the next call returns, and all that it leaves."""
        return [self.step(self.compiled, self.data[1]), *self.state()]

    def state(self) -> list[Tensor]:
        return state_of(self.compiled)

    def reset(self) -> None:
        """Write all weights and states again, as from a checkpoint."""
        write(self.compiled, self.base)

    def check(self, complete: int) -> None:
        """Check what holds after a call of which so many steps are complete."""
        workers = [t for t in threading.enumerate() if t.name.startswith("ipu worker")]
        assert not any(t.is_alive() for t in workers)  # one that never began is listed, too
        assert not any(tensor.any() for tensor in tensors_of(self.compiled, sums=True))
        assert all(map(torch.equal, self.next(), self.expected[complete]))


def tensors_of(compiled, *, sums: bool = False) -> list[Tensor]:
    """All variables on all replicas and the states of a host's optimiser, or the accumulators."""
    executable, states = compiled.executable, compiled._link.optimizer.state.values()
    variables = [
        executable.tensor(variable.name, replica)
        for variable in executable.program.variables
        for replica in executable.replicas.holders(variable)
        if (variable.kind == "accumulator") == sums
    ]
    return variables if sums else variables + [t for state in states for t in state.values()]


def state_of(compiled) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors_of(compiled)]


@torch.no_grad()
def write(compiled, state: list[Tensor]) -> None:
    executable, values = compiled.executable, iter(state)
    executable.write(
        {
            variable.name: [next(values) for _ in executable.replicas.holders(variable)]
            for variable in executable.program.variables
            if variable.kind != "accumulator"
        }
    )
    states = compiled._link.optimizer.state.values()
    for tensor, value in zip((t for s in states for t in s.values()), values, strict=True):
        tensor.copy_(value)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Teams of threads take long where other tests run beside."""
    with intra_op_threads(1):
        yield


@pytest.fixture(autouse=True)
def gradients():
    """A fault may leave the mode of the calling thread."""
    yield
    torch.set_grad_enabled(True)


def subject_of(name: str) -> Any:
    """What makes the calls of a case, and knows what they leave."""
    return FACADE[name]() if name in FACADE else Subject((CASES | MORE)[name])


@pytest.fixture(scope="module")
def subjects():
    """The subject of each case, made when it is asked for."""
    made: dict[str, Any] = {}

    def subject(name: str) -> Any:
        if name not in made:
            made[name] = subject_of(name)
        made[name].reset()
        return made[name]

    yield subject
    for subject in made.values():
        subject.close()


@pytest.fixture
def quiet_threads(monkeypatch):
    """A worker that dies outside its own code says so on its own."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(workers, "_LOOK", 0.02)


def inject(subject: Any, tracer: Tracer) -> None:
    """Make the next call with a fault in it, and check what it leaves."""
    before, raised = subject.steps, False
    with traced(tracer):
        try:
            subject.call()
        except (Interrupt, Failure, IpuError, RuntimeError):
            raised = True  # the error itself would keep the frames of the call
    complete = subject.steps - before
    if not raised:
        assert complete == subject.most
    in_commit = tracer.found == "writing" and subject.lost_in_commit
    if in_commit:
        for _ in range(2):
            with pytest.raises(UpdateError, match="may have written a part of %"):
                subject.compiled(subject.data[1])
        subject.reset()
        complete = 0
    elif tracer.raised and tracer.found in ("open", "voted", "writing"):
        assert complete < subject.most
    subject.check(complete)


def reached_by(subject: Any) -> Counter[Line]:
    """How often a call reaches each line."""
    with traced(tracer := Tracer(folders=subject.folders)):
        subject.call()
    subject.reset()
    return tracer.reached


def faults_of(subject: Any) -> list[tuple]:
    """The first and the last event of each line that a call reaches, with what to raise there."""
    reached = reached_by(subject)
    last = [(line, count, Failure) for line, count in reached.items()]
    return [(line, 1, Interrupt) for line in reached] + [f for f in last if f[1] > 1]


def every_event(subject: Any) -> list[tuple]:
    return [
        (line, count, error)
        for line, most in reached_by(subject).items()
        for count in range(1, most + 1)
        for error in (Interrupt, Failure)
    ]


def check_faults(subject: Any, faults: list[tuple]) -> None:
    raised = 0
    for line, count, error in faults:
        subject.reset()
        tracer = Tracer(line, count, error, lambda: subject.phase, folders=subject.folders)
        try:
            inject(subject, tracer)
        except AssertionError as problem:
            raise AssertionError(f"{error.__name__} at event {count} of {line}") from problem
        raised += tracer.raised
    assert raised > 0.8 * len(faults)  # waiting takes other lines from run to run


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_at_any_line_leaves_complete_steps(name, subjects, quiet_threads):
    subject = subjects(name)
    check_faults(subject, faults_of(subject))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "count"), [*zip(FACADE, (40, 30, 3), strict=True)])
def test_a_fault_in_the_facade_leaves_complete_steps(name, count, subjects, quiet_threads):
    subject = subjects(name)
    faults = faults_of(subject)
    check_faults(subject, faults[:: len(faults) // count])


@pytest.mark.slow
@pytest.mark.parametrize("name", FACADE)
def test_a_fault_at_any_line_of_the_facade_leaves_complete_steps(name, subjects, quiet_threads):
    subject = subjects(name)
    check_faults(subject, faults_of(subject))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES | MORE)
def test_a_fault_at_any_event_leaves_complete_steps(name, subjects, quiet_threads):
    subject = subjects(name)
    check_faults(subject, every_event(subject))


def test_an_interrupt_while_numbers_are_taken_over_keeps_all_of_before(monkeypatch):
    compiled = CASES["two fused functions"].compiled()
    data = torch.ones(ROWS, 3)
    compiled(data)
    link, groups = compiled._link, compiled.groups
    read = link._numbers_now

    def interrupted(optimizer):
        if link.optimizer.param_groups[0]["momentum"] == 0.5 and len(calls) == 1:
            raise Interrupt
        calls.append(optimizer)
        return read(optimizer)

    calls: list[torch.optim.Optimizer] = []
    link.optimizer.param_groups[0]["momentum"] = 0.5
    with monkeypatch.context() as patch:
        patch.setattr(link, "_numbers_now", interrupted)
        with pytest.raises(Interrupt):
            compiled(data)
    assert compiled.groups == groups
