"""Check that workers can follow a schedule, and that its program then computes what it says.

The check follows all workers without computing. Each worker has a clock: of every worker, how many
actions are done surely before its own next one. A send keeps the clock of its worker, and the
receive takes it over.
"""

from typing import TYPE_CHECKING

from ipu_dynamo.errors import CompileError
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.schedule.actions import (
    Action,
    AddGradients,
    ReceiveValues,
    RunPass,
    SendValues,
)
from ipu_dynamo.program.schedule.dependencies import changing_passes, dependencies
from ipu_dynamo.program.schedule.schedule_text import action_text
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import StagePass, calls_of_passes

if TYPE_CHECKING:
    from ipu_dynamo.program.schedule.schedule import Schedule

_Place = tuple[int, int]  # micro-batch, replica
_Done = tuple[int, int]  # worker, and how many actions it has done then
_ORDER = "sums and buffers need the order of micro-batches: let each wait for the one before"


def check(schedule: "Schedule", program: Program, *, adds: bool) -> None:
    """See `Schedule.check`."""
    calls = calls_of_passes(sections(program).loop)
    own, theirs = schedule.passes, tuple(map(StagePass.of, calls))
    if own != theirs:
        pairs = zip(own, theirs, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(theirs)))
        ours, other = (str(of[place]) if place < len(of) else "none" for of in (own, theirs))
        raise CompileError(
            f"the schedule is of another program: its pass {place} is {ours}, the program's {other}",
            hint="start from the printed schedule of this program",
        )
    follower = _Follower(schedule, program, adds=adds)
    follower.follow()
    follower.check_ends()
    _check_stashes(schedule, program)


class _Follower:
    """Follows the workers of a schedule.

    Args:
        adds: whether actions add gradients.
    """

    def __init__(self, schedule: "Schedule", program: Program, *, adds: bool) -> None:
        cut, count = sections(program), len(schedule.workers)
        self._schedule, self._calls, self._adds = schedule, calls_of_passes(cut.loop), adds
        self._needed, self._changing = dependencies(program), changing_passes(program)
        self._micro_batches, self._replicas = cut.micro_batches, program.replicas
        self._maker: dict[str | None, int] = {}
        for index, call in enumerate(self._calls):
            self._maker |= dict.fromkeys(call.results, index)
        self._clocks = [[0] * count for _ in range(count)]
        self._held: list[set[tuple[str | None, int, int]]] = [set() for _ in range(count)]
        self._reached: dict[tuple[int, int, int], int] = {}  # micro-batch, of worker, pass, replica
        self._ran: dict[tuple[int, int, int], _Done] = {}  # by pass and place
        self._added: dict[_Place, _Done] = {}
        self._sent: dict[tuple[int, int, int], list[int]] = {}  # clocks, by transfer and place
        self._received: set[tuple[int, int, int]] = set()

    def follow(self) -> None:
        """Do all actions.

        Raises:
            CompileError: a worker waits for ever, or an action comes too early or twice.
        """
        workers, clocks = self._schedule.workers, self._clocks
        moved = True
        while moved:
            moved = False
            for worker, actions in enumerate(workers):
                clock = clocks[worker]
                while clock[worker] < len(actions) and self._does(worker, actions[clock[worker]]):
                    moved = True
        for worker, actions in enumerate(workers):
            if clocks[worker][worker] < len(actions):
                action = actions[clocks[worker][worker]]
                assert isinstance(action, ReceiveValues)
                transfer = self._schedule.transfers[action.transfer]
                source, target = (self._calls[i] for i in (transfer.source, transfer.target))
                what = f"%{transfer.values[0]}" if transfer.values else f"@{source.function}"
                raise CompileError(
                    f"the schedule cannot finish: stage {target.stage} waits for {what} of stage "
                    f"{source.stage} on {_of(action)}, which nobody sends before it "
                    f"({self._text(action)} of worker {worker})",
                    where=target.source,
                    hint="send it earlier, or receive it later",
                )

    def check_ends(self) -> None:
        """Check that nothing was left out.

        Raises:
            CompileError: a pass or an addition is missing, or what is sent is never received.
        """
        names = self._schedule.names
        for micro_batch in range(self._micro_batches):
            for replica in range(self._replicas):
                place, replicas = (micro_batch, replica), f"r{replica}:" if replica else ""
                for index, name in enumerate(names):
                    if (index, *place) not in self._ran:
                        raise CompileError(
                            f"no worker runs {replicas}{name}{micro_batch}",
                            where=self._calls[index].source,
                        )
                if self._adds and place not in self._added:
                    raise CompileError(f"no worker adds gradients by {replicas}add{micro_batch}")
        for number, micro_batch, replica in self._sent.keys() - self._received:
            sent = self._text(SendValues(number, micro_batch, replica))
            raise CompileError(f"no worker receives {sent}", hint="receive it, or do not send it")

    def _does(self, worker: int, action: Action) -> bool:
        """Do the action of a worker if its turn has come."""
        place = action.micro_batch, action.replica
        if not (place[0] < self._micro_batches and place[1] < self._replicas):
            raise CompileError(
                f"{self._text(action)} is of {_of(action)}, replica {place[1]}; the program has "
                f"{self._micro_batches} micro-batches and {self._replicas} replicas"
            )
        match action:
            case ReceiveValues(transfer=number):
                if (number, *place) not in self._sent:
                    return False
                self._receive(worker, action)
            case SendValues():
                self._send(worker, action)
            case RunPass():
                self._run(worker, action)
            case AddGradients():
                self._add(worker, action)
        self._clocks[worker][worker] += 1
        return True

    def _receive(self, worker: int, action: ReceiveValues) -> None:
        key = action.transfer, action.micro_batch, action.replica
        if key in self._received:
            raise CompileError(f"{self._text(action)} of worker {worker} was received before")
        self._received.add(key)
        clock = self._clocks[worker]
        clock[:] = map(max, clock, self._sent[key])
        values = self._schedule.transfers[action.transfer].values
        self._held[worker].update((name, *key[1:]) for name in values)

    def _send(self, worker: int, action: SendValues) -> None:
        key = action.transfer, action.micro_batch, action.replica
        if key in self._sent:
            raise CompileError(f"{self._text(action)} of worker {worker} was sent before")
        transfer = self._schedule.transfers[action.transfer]
        self._expect(worker, action, transfer.source)
        for name in transfer.values:
            if name in self._maker:
                self._expect_value(worker, action, name)
        clock = self._clocks[worker].copy()
        clock[worker] += 1
        self._sent[key] = clock

    def _run(self, worker: int, action: RunPass) -> None:
        index, micro_batch, replica = action.index, action.micro_batch, action.replica
        call, place = self._calls[index], (micro_batch, replica)
        if (index, *place) in self._ran:
            raise CompileError(f"{self._text(action)} runs twice", where=call.source)
        for name in call.arguments:
            if name in self._maker:
                self._expect_value(worker, action, name)
        for needed in self._needed[index]:
            self._expect(worker, action, needed)
        self._expect_order(worker, action)
        self._ran[index, *place] = worker, self._clocks[worker][worker] + 1
        self._held[worker].update((name, *place) for name in call.results)

    def _expect_order(self, worker: int, action: RunPass) -> None:
        """Check that a pass takes micro-batches in order.

        A worker runs none after a later one. If the pass writes variables, the one before is done.
        """
        index, micro_batch, replica = action.index, action.micro_batch, action.replica
        reached = self._reached.get((worker, index, replica), -1)
        self._reached[worker, index, replica] = micro_batch
        before = self._ran.get((index, micro_batch - 1, replica))
        unsure = index in self._changing and micro_batch and not self._knows(worker, before)
        if unsure or reached > micro_batch:
            call = self._calls[index]
            other = f"after micro-batch {reached}" if reached > micro_batch else (
                f"before micro-batch {micro_batch - 1}"
            )
            raise CompileError(
                f"stage {call.stage} runs @{call.function} on micro-batch {micro_batch} {other} "
                f"({self._text(action)} of worker {worker})",
                where=call.source,
                hint=_ORDER,
            )

    def _add(self, worker: int, action: AddGradients) -> None:
        place, text = (action.micro_batch, action.replica), self._text(action)
        if not self._adds:
            raise CompileError(f"{text} of worker {worker}: the passes of this program add gradients")
        if place in self._added:
            raise CompileError(f"{text} of worker {worker} adds gradients twice")
        for index in range(len(self._calls)):
            self._expect(worker, action, index)
            if self._ran[index, *place][0] != worker:
                raise CompileError(f"{text} of worker {worker}: another worker has the gradients")
        before = (action.micro_batch - 1, action.replica)
        if action.micro_batch and not self._knows(worker, self._added.get(before)):
            raise CompileError(
                f"{text} of worker {worker} adds gradients before those of micro-batch {before[0]}",
                hint=_ORDER,
            )
        self._added[place] = worker, self._clocks[worker][worker] + 1

    def _knows(self, worker: int, done: _Done | None) -> bool:
        """Whether an action is surely done before the next one of a worker."""
        return done is not None and self._clocks[worker][done[0]] >= done[1]

    def _expect(self, worker: int, action: Action, index: int) -> None:
        """Check that a pass of the same micro-batch comes before an action."""
        if not self._knows(worker, self._ran.get((index, action.micro_batch, action.replica))):
            call = self._calls[index]
            first = self._text(RunPass(0, index, action.micro_batch, action.replica))
            raise CompileError(
                f"{self._text(action)} of worker {worker} does not wait for {first}, @{call.function} "
                f"of stage {call.stage}",
                where=call.source,
                hint=f"let {first} come before it, on the same worker or before what it receives",
            )

    def _expect_value(self, worker: int, action: Action, name: str) -> None:
        """Check that a worker has a value that some pass makes."""
        if (name, action.micro_batch, action.replica) not in self._held[worker]:
            maker = self._calls[self._maker[name]]
            raise CompileError(
                f"{self._text(action)} of worker {worker} needs %{name} of stage {maker.stage} on "
                f"{_of(action)}, which the worker has neither made nor received before",
                where=maker.source,
                hint=f"run @{maker.function} before it, or send the value to worker {worker}",
            )

    def _text(self, action: Action) -> str:
        return action_text(action, self._schedule.names, self._schedule.transfers)


def _of(action: Action) -> str:
    return f"micro-batch {action.micro_batch}"


def _check_stashes(schedule: "Schedule", program: Program) -> None:
    peak = schedule.stash()
    for stash in program.stash:
        needed = peak.get(stash.stage, 0)
        if needed > stash.copies:
            values = ", ".join(f"%{name}" for name, _ in stash.values) or "no value"
            raise CompileError(
                f"the stash of stage {stash.stage} on IPU {stash.ipu} is too shallow: it "
                f"holds {values} of {stash.copies} micro-batches, and the schedule needs "
                f"{needed}",
                hint="run the backward passes earlier, or use the sharded strategy",
            )
