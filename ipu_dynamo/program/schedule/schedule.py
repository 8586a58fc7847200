"""Say which worker runs which call on which micro-batch, in which order: a plan that can be read,
drawn and checked before anything runs."""

from collections.abc import Iterator
from dataclasses import dataclass

from ipu_dynamo.errors import CompileError
from ipu_dynamo.program import Call, Stash
from ipu_dynamo.program.ir.made_names import on_ipu
from ipu_dynamo.program.schedule.drawing import draw
from ipu_dynamo.program.schedule.timing import timed

_MARKS = {"forward": "", "backward": "'", "forward_backward": "*", "weights": '"'}


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """The `call`-th call of a micro-batch, on micro-batch `micro_batch` of its replica and step.

    It begins in `cycle` and is planned to take `length` cycles.
    """

    cycle: int
    call: int
    micro_batch: int
    replica: int = 0
    length: int = 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tasks of every worker, each in the order in which the worker runs them.

    Args:
        calls: the calls of one micro-batch, in program order.
        workers: for each worker, its tasks. All calls of a stage belong to one worker, unless
            each worker has micro-batches of its own.
        waits: for each call, the calls whose results it needs from another worker.
        stashes: what stages keep for their backward passes, and of how many micro-batches they
            may.
        readers: for each call, the calls that must have done the micro-batch two before, so that
            no more results wait for them than one; empty where nothing waits so.
    """

    calls: tuple[Call, ...]
    workers: tuple[tuple[Task, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    stashes: tuple[Stash, ...] = ()
    readers: tuple[tuple[int, ...], ...] = ()

    def needs(self, task: Task) -> list[tuple[int, int]]:
        """The calls on micro-batches that other workers must have done before a task."""
        needed = [(call, task.micro_batch) for call in self.waits[task.call]]
        if self.readers and task.micro_batch >= 2:
            needed += [(call, task.micro_batch - 2) for call in self.readers[task.call]]
        return needed

    @property
    def cycles(self) -> int:
        """Pipeline cycles of a step, ramp-up and ramp-down included."""
        return max((t.cycle + t.length for tasks in self.workers for t in tasks), default=0)

    @property
    def rows(self) -> tuple[str, ...]:
        """The name of each worker: its IPU, where it has only one, and for itself."""
        several = any(task.replica for tasks in self.workers for task in tasks)
        of_workers = [
            {(self.calls[task.call].ipu, task.replica) for task in tasks} for tasks in self.workers
        ]
        names = []
        for worker, places in enumerate(of_workers):
            if len(places) == 1 and of_workers.count(places) == 1:
                ((ipu, replica),) = places
                names.append(f"ipu{ipu} of replica {replica}" if several else f"ipu{ipu}")
            else:
                names.append(f"worker {worker}")
        if len(set(names)) < len(names):  # several share an IPU
            names = [f"worker {worker}" for worker in range(len(names))]
        return tuple(names)

    def stash(self) -> dict[int, int]:
        """For each stage, of how many micro-batches at most it keeps values for backward."""
        ends = {call.stage: index for index, call in enumerate(self.calls)}
        peak = dict.fromkeys(sorted(ends), 0)
        alive: dict[tuple[int, int], set[int]] = {}
        for tasks in self.workers:
            for task in tasks:
                stage = self.calls[task.call].stage
                kept = alive.setdefault((stage, task.replica), set())
                kept.add(task.micro_batch)
                peak[stage] = max(peak[stage], len(kept))
                if task.call == ends[stage]:
                    kept.remove(task.micro_batch)
        return peak

    def check(self) -> None:
        """Run the schedule without computing.

        Raises:
            CompileError: tasks wait for each other or for themselves, a call takes micro-batches
                out of order, or a stash is too shallow; stage and value are named.
        """
        self._check_order()
        self._check_progress()
        self._check_stashes()

    def _check_order(self) -> None:
        for worker in self.workers:
            reached: dict[tuple[int, int], int] = {}
            for task in worker:
                before = reached.get((task.call, task.replica), -1)
                if task.micro_batch <= before:
                    call = self.calls[task.call]
                    raise CompileError(
                        f"stage {call.stage} runs @{call.function} on micro-batch "
                        f"{task.micro_batch} after micro-batch {before}",
                        hint="gradients are summed in the order of micro-batches: keep it",
                    )
                reached[task.call, task.replica] = task.micro_batch

    def _check_progress(self) -> None:
        sources = [list(self._sources(index)) for index in range(len(self.calls))]
        for index, waits in enumerate(self.waits):
            if index in (*waits, *sources[index]):
                call = self.calls[index]
                raise CompileError(
                    f"stage {call.stage} waits for itself: @{call.function} needs "
                    f"{self._value(index, index)}, which it makes",
                    where=call.source,
                    hint="read a value that an earlier call makes",
                )
        done: set[tuple[int, int, int]] = set()

        def missing(task: Task) -> list[tuple[int, int]]:
            needed = [*self.needs(task), *((c, task.micro_batch) for c in sources[task.call])]
            return [(c, m) for c, m in needed if (c, m, task.replica) not in done]

        stuck: list[Task] = []
        left = [iter(tasks) for tasks in self.workers]
        heads = [next(tasks, None) for tasks in left]
        while any(heads):
            stuck = [task for task in heads if task is not None]
            for worker, task in enumerate(heads):
                while task and not missing(task):
                    done.add((task.call, task.micro_batch, task.replica))
                    task = next(left[worker], None)
                heads[worker] = task
            if stuck == [task for task in heads if task is not None]:
                break
        else:
            return
        task = stuck[0]
        call = self.calls[task.call]
        source, micro_batch = missing(task)[0]
        raise CompileError(
            f"the schedule cannot finish: stage {call.stage} waits for "
            f"{self._value(task.call, source)} of stage {self.calls[source].stage} on "
            f"micro-batch {micro_batch}, which never runs before it",
            where=call.source,
            hint="use the sharded strategy, or another order of stages",
        )

    def _check_stashes(self) -> None:
        peak = self.stash()
        for stash in self.stashes:
            needed = peak.get(stash.stage, 0)
            if needed > stash.copies:
                values = ", ".join(f"%{name}" for name, _ in stash.values) or "no value"
                raise CompileError(
                    f"the stash of stage {stash.stage} on IPU {stash.ipu} is too shallow: it "
                    f"holds {values} of {stash.copies} micro-batches, and the schedule needs "
                    f"{needed}",
                    hint="run the backward passes earlier, or use the sharded strategy",
                )

    def _sources(self, index: int) -> Iterator[int]:
        """The calls whose results a call reads."""
        for other in range(len(self.calls)):
            if self._read(index, other):
                yield other

    def _read(self, index: int, source: int) -> list[str]:
        """What the call `index` reads of the results of the call `source`."""
        call = self.calls[index]
        return [
            name
            for name in self.calls[source].results
            if name and (name in call.arguments or on_ipu(name, call.ipu) in call.arguments)
        ]

    def _value(self, index: int, source: int) -> str:
        """A name for what `index` awaits from `source`: a value, or the call that orders them."""
        read = self._read(index, source)
        return f"%{read[0]}" if read else f"@{self.calls[source].function}"

    def __str__(self) -> str:
        """A row per worker, a column per cycle; `2` is forward, `2'` backward of micro-batch 2,
        `2*` both, `2"` its weight gradients; `-` goes on with the call before."""
        rows = []
        for name, tasks in zip(self.rows, self.workers, strict=True):
            cells: dict[int, list[str]] = {}
            for task in tasks:
                replica = f"r{task.replica}:" if task.replica and name.startswith("w") else ""
                mark = _MARKS[self.calls[task.call].direction]
                cells.setdefault(task.cycle, []).append(f"{replica}{task.micro_batch}{mark}")
                for cycle in range(task.cycle + 1, task.cycle + task.length):
                    cells.setdefault(cycle, []).append("-")
            rows.append([name, *(" ".join(cells.get(c, ["."])) for c in range(self.cycles))])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    @property
    def idle(self) -> float:
        """Share of the workers' time in which they have nothing to do, when `timed`."""
        whole = self.timed()
        busy = sum(task.length for tasks in whole.workers for task in tasks)
        return 1 - busy / (whole.cycles * len(whole.workers)) if busy else 0.0

    def timed(self) -> "Schedule":
        """The schedule with a cycle for each pass instead of each stage, and no lock-step."""
        return timed(self)

    def svg(self) -> str:
        """A drawing: a row per worker, a column per cycle, a box per task; self-contained."""
        return draw(self)
