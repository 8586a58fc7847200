"""Check that workers can follow a schedule, and that they then run its program.

The check follows all workers without computing. Each worker has a vector clock: for every worker,
the number of its actions that surely happen before the next action here. A message carries the
clock of its sender.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from ipu_dynamo.errors import CompileError
from ipu_dynamo.program.ir.instructions import Call
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.schedule.actions import (
    Action,
    AddGradients,
    ReceiveValues,
    RunPass,
    SendValues,
    follow,
)
from ipu_dynamo.program.schedule.dependencies import changing_passes, dependencies
from ipu_dynamo.program.schedule.schedule_text import action_text
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import (
    StagePass,
    calls_of_passes,
    exchanges_of_passes,
)

if TYPE_CHECKING:
    from ipu_dynamo.program.schedule.schedule import Schedule

_Place = tuple[int, int]  # micro-batch, replica
_Done = tuple[int, int]  # worker, and how many actions it has done then
_ORDER = "sums and buffers need the order of micro-batches: let each wait for the one before"


def check(schedule: "Schedule", program: Program, *, adds: bool, replicas: int) -> None:
    """See `Schedule.check`."""
    calls = calls_of_passes(sections(program).loop)
    own = tuple(replace(one, repeats=False) for one in schedule.passes)  # as times, it is no matter
    theirs = tuple(map(StagePass.of, calls))
    if own != theirs:
        pairs = zip(own, theirs, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(theirs)))
        ours, other = (str(of[place]) if place < len(of) else "none" for of in (own, theirs))
        raise CompileError(
            f"the schedule is of another program: its pass {place} is {ours}, and not {other}",
            hint="start from the printed schedule of this program",
        )
    follower = _Follower(schedule, program, calls, adds=adds, replicas=replicas)
    follower.follow()
    follower.check_ends()
    _check_stashes(schedule, program)


class _Follower:
    """Follows the workers of a schedule.

    Args:
        calls: the program's passes as calls.
        adds: whether actions add gradients.
        replicas: that the schedule plans.
    """

    def __init__(
        self,
        schedule: "Schedule",
        program: Program,
        calls: Sequence[Call],
        *,
        adds: bool,
        replicas: int,
    ) -> None:
        count = len(schedule.workers)
        self._schedule, self._calls, self._adds = schedule, calls, adds
        self._needed, self._changing = dependencies(program), changing_passes(program)
        self._exchanges = exchanges_of_passes(sections(program).loop)
        self._micro_batches, self._replicas = sections(program).micro_batches, replicas
        self._maker: dict[str | None, int] = {}
        for index, call in enumerate(calls):
            self._maker |= dict.fromkeys(call.results, index)
        # of each pass and transfer, the values that some pass makes
        self._reads = [self._maker.keys() & call.arguments for call in calls]
        self._sends = [self._maker.keys() & transfer.values for transfer in schedule.transfers]
        self._clocks = [[0] * count for _ in range(count)]
        held = defaultdict[_Place, set[str | None]]
        self._held = [held(set) for _ in range(count)]
        self._reached: dict[tuple[int, int, int], int] = {}  # micro-batch, of worker, pass, replica
        self._ran = defaultdict[_Place, dict[int, _Done]](dict)  # by place and pass
        self._added: dict[_Place, _Done] = {}
        self._sent: dict[tuple[int, int, int], list[int]] = {}  # clocks, by transfer and place
        # by worker: if all replicas exchange a value, several workers receive one message
        self._received: set[tuple[int, tuple[int, int, int]]] = set()

    def follow(self) -> None:
        """Do all actions.

        Raises:
            CompileError: a worker waits for ever, or an action comes too early or twice.
        """
        workers = self._schedule.workers
        for worker, done in enumerate(follow(workers, self._does)):
            if done < len(workers[worker]):
                action = workers[worker][done]
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
            CompileError: a pass or an addition is missing, or a transfer is sent, never received.
        """
        names = self._schedule.names
        for micro_batch in range(self._micro_batches):
            for replica in range(self._replicas):
                place, replicas = (micro_batch, replica), f"r{replica}:" if replica else ""
                for index, name in enumerate(names):
                    if index not in self._ran[place]:
                        raise CompileError(
                            f"no worker runs {replicas}{name}{micro_batch}",
                            where=self._calls[index].source,
                        )
                if self._adds and place not in self._added:
                    raise CompileError(f"no worker adds gradients by {replicas}add{micro_batch}")
        received = {message for _, message in self._received}
        for number, micro_batch, replica in self._sent.keys() - received:
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
        if (worker, key) in self._received:
            raise CompileError(f"{self._text(action)} of worker {worker} was received before")
        self._received.add((worker, key))
        clock = self._clocks[worker]
        clock[:] = map(max, clock, self._sent[key])
        self._held[worker][key[1:]].update(self._schedule.transfers[action.transfer].values)

    def _send(self, worker: int, action: SendValues) -> None:
        key = action.transfer, action.micro_batch, action.replica
        if key in self._sent:
            raise CompileError(f"{self._text(action)} of worker {worker} was sent before")
        transfer = self._schedule.transfers[action.transfer]
        self._expect(worker, action, (transfer.source,))
        self._expect_values(worker, action, self._sends[action.transfer])
        clock = self._clocks[worker].copy()
        clock[worker] += 1
        self._sent[key] = clock

    def _run(self, worker: int, action: RunPass) -> None:
        index, micro_batch, replica = action.index, action.micro_batch, action.replica
        call, place = self._calls[index], (micro_batch, replica)
        if index in self._ran[place]:
            raise CompileError(f"{self._text(action)} runs twice", where=call.source)
        self._expect_values(worker, action, self._reads[index])
        self._expect(worker, action, self._needed[index])
        for other in range(self._replicas) if index in self._exchanges else ():
            self._expect(worker, action, self._exchanges[index], other)
        self._expect_order(worker, action)
        self._ran[place][index] = worker, self._clocks[worker][worker] + 1
        self._held[worker][place].update(call.results)

    def _expect_order(self, worker: int, action: RunPass) -> None:
        """Check that a pass takes micro-batches in order.

        A worker runs none after a later one. If the pass writes variables, the one before is done.
        """
        index, micro_batch, replica = action.index, action.micro_batch, action.replica
        reached = self._reached.get((worker, index, replica), -1)
        self._reached[worker, index, replica] = micro_batch
        unsure = False
        if index in self._changing and micro_batch:
            unsure = not self._knows(worker, self._ran[micro_batch - 1, replica].get(index))
        if unsure or reached > micro_batch:
            call, other = self._calls[index], f"before micro-batch {micro_batch - 1}"
            if reached > micro_batch:
                other = f"after micro-batch {reached}"
            raise CompileError(
                f"stage {call.stage} runs @{call.function} on micro-batch {micro_batch} {other} "
                f"({self._text(action)} of worker {worker})",
                where=call.source,
                hint=_ORDER,
            )

    def _add(self, worker: int, action: AddGradients) -> None:
        place, text = (action.micro_batch, action.replica), self._text(action)
        if not self._adds:
            raise CompileError(
                f"{text} of worker {worker}: the passes of this program add gradients"
            )
        if place in self._added:
            raise CompileError(f"{text} of worker {worker} adds gradients twice")
        self._expect(worker, action, range(len(self._calls)))
        if any(by != worker for by, _ in self._ran[place].values()):
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

    def _expect(
        self, worker: int, action: Action, indices: Iterable[int], of: int | None = None
    ) -> None:
        """Check that passes of the same micro-batch come before an action.

        Args:
            of: their replica; None: the action's own.
        """
        replica = action.replica if of is None else of
        clock, ran = self._clocks[worker], self._ran[action.micro_batch, replica]
        for index in indices:
            if index in ran and clock[ran[index][0]] >= ran[index][1]:
                continue
            call = self._calls[index]
            first = self._text(RunPass(0, index, action.micro_batch, replica))
            raise CompileError(
                f"{self._text(action)} of worker {worker} does not wait for {first}, "
                f"@{call.function} of stage {call.stage}",
                where=call.source,
                hint=f"let {first} come before it, on the same worker or before what it receives",
            )

    def _expect_values(self, worker: int, action: Action, names: Set[str | None]) -> None:
        """Check that a worker has values that passes make."""
        held = self._held[worker][action.micro_batch, action.replica]
        if not names <= held:
            name = min(names - held, key=str)
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
