"""Show one compiled program: the work of the IPUs, and that of this computer in their place."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from ipu_dynamo.inspection.cut_table import CutTable, cut_table, variables_of_stages
from ipu_dynamo.inspection.followed_memory import why_not_followed
from ipu_dynamo.inspection.host_memory import HostMemory
from ipu_dynamo.program import Call, Decision, HostProgram, Program
from ipu_dynamo.program.host_plan import HostPlan
from ipu_dynamo.program.ir.types import counted
from ipu_dynamo.program.schedule.planning import schedule_of
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stash import Stash
from ipu_dynamo.runtime.execute.call_timeline import TaskBytes
from ipu_dynamo.runtime.execute.executable import Executable
from ipu_dynamo.runtime.execute.reentrant import BoundProgram
from ipu_dynamo.runtime.execute.timeline import Timeline

_MOST_OPERATORS = 20_000  # of a step: following them takes seconds
_NOT_RECORDED = 'no call was recorded: compile with Options(record="timeline")'


@dataclass(frozen=True)
class HostEntry:
    """The form in which this computer runs a program.

    It may differ from the IPUs: it keeps values that these compute again, joins a step and its
    update, and has threads in place of IPUs.

    Args:
        program: the program in its forms for this computer; micro-batches run `program.runs`.
        schedule: the work of this computer's threads, in order; None: see `absent`.
    """

    program: HostProgram
    schedule: Schedule | None
    _absent: Mapping[str, str] = field(default_factory=dict, repr=False)
    _plan: Callable[[], HostPlan] | None = field(default=None, repr=False)
    _timeline: Callable[[], Timeline | None] | None = field(default=None, repr=False)
    _memory: Callable[[], HostMemory] | None = field(default=None, repr=False)
    _no_memory: Callable[[], str] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, executable: Executable) -> "HostEntry":
        """The entry of a program of whole steps, which an executable runs."""
        fused = "the step is one function, which no schedule runs"
        schedule = None if executable.fused else executable.schedule
        host = executable.host_program
        absent = {"timeline": _NOT_RECORDED, **({} if schedule else {"schedule": fused})}
        return cls(
            host,
            schedule,
            absent,
            lambda: executable.host_plan,
            lambda: executable.timeline,
            partial(memory_of, executable),
            lambda: why_not_followed(_running(executable)),
        )

    @classmethod
    def lowered(cls, host: HostProgram) -> "HostEntry":
        """The entry of a program that is only lowered: no executable runs it."""
        only = "the program was lowered, and nothing is there that runs it"
        return cls(host, None, dict.fromkeys(("schedule", "plan", "timeline", "memory"), only))

    @classmethod
    def bound(cls, bound: BoundProgram) -> "HostEntry":
        """The entry of a program of `torch.compile`."""
        absent = {
            "timeline": "calls through torch.compile are recorded by ipu_dynamo.profile only",
            "memory": "PyTorch's autograd keeps the values between these programs",
        }
        return cls(bound.host, bound.schedule, absent, bound.plan)

    @cached_property
    def absent(self) -> Mapping[str, str]:
        """Why a member is None, by its name."""
        why = "" if self._no_memory is None else self._no_memory()
        return {**self._absent, "memory": why} if why else self._absent

    @property
    def why_no_schedule(self) -> str:
        """Why no schedule is there; asks nothing else."""
        return self._absent.get("schedule", "")

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions for this computer, each with its reason."""
        plan = self.plan
        return self.program.decisions if plan is None else plan.decisions

    @property
    def decisions_of_micro_batch(self) -> tuple[Decision, ...]:
        """The same for all calls of a micro-batch: equal decisions once, with their count."""
        calls = Counter(call.function for call in self.program.runs.calls)
        counts: Counter[tuple[str, ...]] = Counter()
        first: dict[tuple[str, ...], Decision] = {}
        for one in self.decisions:
            key = (one.by, one.of, one.choice, one.reason, "" if one.of else one.function)
            counts[key] += one.count * (calls[one.function] or 1)
            first.setdefault(key, one)
        return tuple(
            replace(one, count=counts[key] if one.of else one.count) for key, one in first.items()
        )

    @property
    def plan(self) -> HostPlan | None:
        """How a step runs here, function by function; printed as text. None: see `absent`."""
        return None if self._plan is None else self._plan()

    @property
    def timeline(self) -> Timeline | None:
        """When each task of the last recorded call ran; None: see `absent`."""
        timeline = None if self._timeline is None else self._timeline()
        return timeline if timeline is not None and timeline.spans else None

    @cached_property
    def memory(self) -> HostMemory | None:
        """Bytes at each step of the micro-batches of `program.runs`; None: see `absent`."""
        return None if "memory" in self.absent or self._memory is None else self._memory()

    @property
    def memory_or_reason(self) -> HostMemory | str:
        """The memory, or why it is None."""
        return self.memory or f"the memory is not known: {self.absent['memory']}"

    def __str__(self) -> str:
        return str(self.plan or self.program)

    def __repr__(self) -> str:
        workers = 0 if self.schedule is None else len(self.schedule.workers)
        count = counted(workers, "worker") if workers else "no schedule"
        return f"<this computer's part of a {self.program.program.kind} program: {count}>"


def _running(executable: Executable) -> HostProgram:
    """The program in the form that runs.

    A fused step is made again for other hyperparameters. A function whose compiled code was wrong
    runs operator by operator.
    """
    host = executable.host_program if executable.fused is None else executable.fused.now.host
    recipes = {
        name: recipe.by_operators() if executable.failed_check(recipe.function) else recipe
        for name, recipe in host.recipes.items()
    }
    return replace(host, recipes=recipes)


def memory_of(executable: Executable) -> HostMemory:
    """Follow the memory of a step, in the form that runs."""
    fused, host = executable.fused, _running(executable)
    calls = [i for i in sections(host.runs).loop if isinstance(i, Call)]
    variables = {
        stage: [(v.kind, v.held.nbytes * len(host.replicas.holders(v))) for v in of]
        for stage, of in variables_of_stages(host.runs, calls).items()
    }
    numbers = () if fused is None else fused.prepared.hyperparameters
    return HostMemory.of(host, executable.schedule, executable.batching, numbers, variables)


def tasks_of(executable: Executable) -> list[TaskBytes]:
    """The memory around each task of a step, for traces; none where it is not followed, or where
    that takes long."""
    host = _running(executable)
    nodes = {f.name: len(f.graph.graph.nodes) for f in host.runs.functions}
    passes = sections(host.runs).micro_batches * len(host.replicas.own)
    if passes * sum(nodes[call.function] for call in host.runs.calls) > _MOST_OPERATORS:
        return []
    return [] if why_not_followed(host) else memory_of(executable).tasks()


@dataclass(frozen=True)
class ProgramEntry:
    """One compiled program.

    Args:
        program: the work of every IPU.
        host: the form in which this computer runs it; None: see `absent`.
        absent: why a member is None, by its name.
    """

    program: Program
    host: HostEntry | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    _schedule: Schedule | None = field(default=None, repr=False)

    @classmethod
    def bound(cls, bound: BoundProgram) -> "ProgramEntry":
        """A program of `torch.compile`."""
        return cls(bound.host.program, HostEntry.bound(bound), _schedule=bound.ipu_schedule)

    @property
    def text(self) -> str:
        """The program as people read it, with the user's line of each operator."""
        return str(self.program)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of each IPU of every replica; recomputation counts."""
        return self._schedule or schedule_of(
            self.program,
            micro_batches=self.micro_batches,
            replicas=self.program.replicas,
            workers=None,
        )

    @property
    def stash(self) -> tuple[Stash, ...]:
        """For each stage of a training pipeline, what its IPU keeps for the backward pass."""
        return self.program.stash

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step has, on each replica."""
        return sections(self.program).micro_batches

    @cached_property
    def cut(self) -> CutTable:
        """The table of stages: layers, time and memory of each."""
        timeline = None if self.host is None else self.host.timeline
        return cut_table(self.program, self.schedule, timeline)

    @property
    def size(self) -> str:
        """How many stages, IPUs, micro-batches and replicas it has."""
        program, count = self.program, self.micro_batches
        parts = [f"{counted(program.num_stages, 'stage')} on {counted(program.num_ipus, 'IPU')}"]
        if count > 1:
            parts.append(counted(count, "micro-batch", "micro-batches"))
        if program.replicas > 1:
            parts.append(counted(program.replicas, "replica"))
        return ", ".join(parts)

    @property
    def title(self) -> str:
        """Its kind and size."""
        return f"{self.program.kind}: {self.size}"

    def summary(self) -> list[str]:
        """Lines on the cut, and on the times of the IPUs and of this computer."""
        lines, several = str(self.cut).splitlines(), self.program.num_ipus * self.micro_batches > 1
        if several:
            lines.append(f"IPU: {_times(self.schedule, 'IPU')}")
        if self.host is None:
            lines.append(f"this computer: none: {self.absent.get('host', 'it is not bound')}")
        elif self.host.schedule is None:
            lines.append(f"this computer: {self.host.why_no_schedule}")
        elif several:
            lines.append(f"this computer: {_times(self.host.schedule, 'worker')}")
        return lines

    def details(self) -> list[str]:
        """Lines on what the stages keep, and on the decisions for this computer."""
        lines = [f"IPU: {stash}" for stash in self.stash]
        decisions = () if self.host is None else self.host.decisions_of_micro_batch
        return [*lines, *(f"this computer: {one}" for one in decisions)]

    def __str__(self) -> str:
        lines = [f"program {self.title}", *(f"  {line}" for line in self.summary())]
        return "\n".join([*lines, *(f"  {line}" for line in self.details())])

    def __repr__(self) -> str:
        return f"<program {self.title}>"


def _times(schedule: Schedule, worker: str) -> str:
    """The length of a step in the units of the schedule."""
    on, cycles = counted(len(schedule.workers), worker), counted(schedule.timed().cycles, "cycle")
    return f"a step takes {cycles} on {on}, {schedule.idle:.0%} idle"
