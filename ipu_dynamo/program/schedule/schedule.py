"""Plan the actions of workers. A schedule is printed, parsed, drawn and checked before it runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ipu_dynamo.options.schedule_order import read_order
from ipu_dynamo.program import Call, Program
from ipu_dynamo.program.ir.types import columns
from ipu_dynamo.program.schedule.actions import (
    Action,
    AddGradients,
    ReceiveValues,
    RunPass,
    SendValues,
    Transfer,
)
from ipu_dynamo.program.schedule.check_schedule import check
from ipu_dynamo.program.schedule.drawing import draw
from ipu_dynamo.program.schedule.pipeline_clock import waits_of
from ipu_dynamo.program.schedule.pipeline_orders import chain_of, runs_of_workers
from ipu_dynamo.program.schedule.schedule_text import LETTERS, read_schedule, write_schedule
from ipu_dynamo.program.schedule.stage_passes import NO_EXCHANGES, Exchanges, StagePass
from ipu_dynamo.program.schedule.stash import most_kept
from ipu_dynamo.program.schedule.timing import timed
from ipu_dynamo.program.schedule.transfers import plan_transfers
from ipu_dynamo.svg_picture import Picture

_MARKS = {"forward": "", "backward": "'", "forward_backward": "*", "weights": '"'}


@dataclass(frozen=True)
class Schedule:
    """The actions of every worker, each in the order in which the worker does them.

    Args:
        passes: the stage passes of one micro-batch, in program order.
        workers: for each worker, its actions.
        transfers: what workers send each other.
    """

    passes: tuple[StagePass, ...]
    workers: tuple[tuple[Action, ...], ...]
    transfers: tuple[Transfer, ...] = ()

    @classmethod
    def of_runs(
        cls,
        calls: Sequence[Call],
        runs: Sequence[Sequence[RunPass]],
        waits: Sequence[Sequence[int]],
        readers: Sequence[Sequence[int]] = (),
        exchanges: Exchanges = NO_EXCHANGES,
    ) -> "Schedule":
        """Make a schedule of runs. Workers send right after a pass, and receive right before one.

        Args:
            calls: the passes of one micro-batch as calls, in program order.
            runs: the runs of each worker. All passes of an IPU and replica have one worker.
            waits: for each call, the earlier calls that must be done before it.
            readers: for each call, the later calls that must have done the micro-batch two before.
                So they are at most two micro-batches behind. Empty: no call waits for its readers.
            exchanges: a call that replicas exchange values before waits for those of all replicas.
        """
        workers, transfers = plan_transfers(calls, runs, waits, readers, exchanges)
        return cls(tuple(map(StagePass.of, calls)), workers, transfers)

    @cached_property
    def runs(self) -> tuple[tuple[RunPass, ...], ...]:
        """For each worker, the passes that it runs."""
        return tuple(tuple(a for a in of if isinstance(a, RunPass)) for of in self.workers)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """A name for each pass: `1FB` is forward and backward of stage 1, `W` weight gradients."""
        seen: Counter[str] = Counter()
        names = []
        for one in self.passes:
            name = f"{one.stage}{LETTERS[one.direction]}"
            names.append(name + "b" * seen[name])
            seen[name] += 1
        return tuple(names)

    @property
    def cycles(self) -> int:
        """Pipeline cycles of a step, ramp-up and ramp-down included."""
        return max((run.cycle + run.length for of in self.runs for run in of), default=0)

    @property
    def rows(self) -> tuple[str, ...]:
        """The name of each worker: its IPU, where it has only one, and for itself."""
        several = any(run.replica for of in self.runs for run in of)
        of_workers = [{(self.passes[run.index].ipu, run.replica) for run in of} for of in self.runs]
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
        return most_kept([one.stage for one in self.passes], self.runs)

    def for_share(self, replicas: range, ipus: range, first: int) -> "Schedule":
        """The workers of one rank. Transfers from other ranks are not changed.

        Args:
            replicas, ipus: of the rank; replicas as the schedule numbers them.
            first: number of the schedule's first replica in the program.
        """
        workers = []
        for of, runs in zip(self.workers, self.runs, strict=True):
            places = {(run.replica, self.passes[run.index].ipu) for run in runs}
            if places and all(r in replicas and ipu in ipus for r, ipu in places):
                workers.append(tuple(replace(a, replica=a.replica + first) for a in of))
        used = dict.fromkeys(
            a.transfer for of in workers for a in of if isinstance(a, SendValues | ReceiveValues)
        )
        numbers = {transfer: number for number, transfer in enumerate(sorted(used))}
        renumbered = tuple(
            tuple(a if isinstance(a, RunPass | AddGradients) else
                  replace(a, transfer=numbers[a.transfer]) for a in of)
            for of in workers or [()]
        )  # fmt: skip
        return Schedule(self.passes, renumbered, tuple(self.transfers[t] for t in sorted(used)))

    def check(self, program: Program, *, adds: bool = False, replicas: int | None = None) -> None:
        """Follow the schedule without computing.

        Args:
            program: the one that it schedules.
            adds: whether gradients are added by actions, and not by passes.
            replicas: that it plans; None: all of the program.

        Raises:
            CompileError: the passes are not those of the program. Or a pass never runs, runs twice,
                takes micro-batches out of order, or reads a value that its worker neither made nor
                received. Or workers wait for each other, a sum of gradients has another order, or a
                stash is too shallow. Pass, stage and value are named.
        """
        check(self, program, adds=adds, replicas=replicas or program.replicas)

    def __str__(self) -> str:
        """Write a line for each pass, transfer and worker. `parse` reads them.

            schedule of 3 passes on 2 workers
              0F: @forward0 on ipu0  # model.py:12 in forward: h = self.a(x)
              1FB: @step1 on ipu1  # model.py:13 in forward: return self.b(h).sum()
              0B: @backward0 on ipu0  # model.py:12 in forward: h = self.a(x)
              0F>1FB: %h..on1
              1FB>0B: %dh..on0
              worker 0: 0F0 0F0>1FB | 0F1 0F1>1FB | 0B<1FB0 0B0 | 0B<1FB1 0B1
              worker 1:  | 1FB<0F0 1FB0 1FB0>0B | 1FB<0F1 1FB1 1FB1>0B

        `0F1` runs the forward pass of stage 0 on micro-batch 1. `0F1>1FB` sends its values to the
        pass 1FB, and `1FB<0F1` receives them there. `add1` adds the gradients of micro-batch 1.
        `|` begins the next pipeline cycle, and `-` continues the pass before it. `r1:0F1` is an
        action of replica 1; before a pass that replicas exchange values for, `r1:1FB<0F1` receives
        those of replica 1.
        """
        return write_schedule(self)

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read the text that `str` writes, or an order of passes as a strategy takes it.

        Cycles change no order. A text may leave them out. An order is checked: it has each pass
        once and can finish. Its schedule has a chain of stages, and functions without names.

        Raises:
            ValueError: a line is not as expected (with its number), or an order is not complete.
        """
        if text.lstrip().startswith("worker"):
            calls, count = chain_of(read_order(text))
            workers = {(0, ipu): ipu for ipu in range(1 + max(call.ipu for call in calls))}
            waits = waits_of(calls)
            runs = runs_of_workers(calls, waits, workers, schedule=text, micro_batches=count)
            return cls.of_runs(calls, runs, waits)
        return read_schedule(text, cls)

    def grid(self) -> str:
        """A row per worker, a column per cycle; `2` is forward, `2'` backward of micro-batch 2,
        `2*` both, `2"` its weight gradients; `-` goes on with the pass before."""
        rows = []
        for name, runs in zip(self.rows, self.runs, strict=True):
            cells: dict[int, list[str]] = {}
            for run in runs:
                replica = f"r{run.replica}:" if run.replica and name.startswith("w") else ""
                mark = _MARKS[self.passes[run.index].direction]
                cells.setdefault(run.cycle, []).append(f"{replica}{run.micro_batch}{mark}")
                for cycle in range(run.cycle + 1, run.cycle + run.length):
                    cells.setdefault(cycle, []).append("-")
            rows.append([name, *(" ".join(cells.get(c, ["."])) for c in range(self.cycles))])
        return "\n".join(columns(rows))

    @property
    def idle(self) -> float:
        """Share of the workers' time in which they have nothing to do, when `timed`."""
        whole = self.timed()
        busy = sum(run.length for of in whole.runs for run in of)
        return 1 - busy / (whole.cycles * len(whole.workers)) if busy else 0.0

    def timed(
        self, lengths: Sequence[int] | None = None, delays: Sequence[int] | None = None
    ) -> "Schedule":
        """The schedule by given times of passes and transfers, and no lock-step.

        Args:
            lengths: of each pass; None: a cycle for each kind of work in it.
            delays: of each transfer; None: none.
        """
        return timed(self, lengths, delays)

    def svg(self, *, cycles: bool = False) -> Picture:
        """Draw the schedule: a row per worker, a box per pass, whose width is its time.

        Args:
            cycles: draw the schedule's own cycles: those of the lock-step, or the times that
                `timed` was given. Without it, times are those of `timed()`.
        """
        return draw(self, cycles=cycles)

    def _repr_svg_(self) -> str:
        return self.svg()
