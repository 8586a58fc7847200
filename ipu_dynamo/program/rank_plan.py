"""List each rank's part of a program on a mesh, and the messages between ranks in a step.

    python -m ipu_dynamo.program.rank_plan PROGRAM.txt --mesh 256x4

The file is a printed program (`program.text()`), and the mesh has 256 blocks of replicas and 4 of
IPUs. No process group is needed. Ranks of one column differ in their replicas only, so the plan has
one part for each column.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ipu_dynamo.errors import CompileError, IpuError
from ipu_dynamo.program.ir.collectives import Collective
from ipu_dynamo.program.ir.instructions import AllReduce, ReduceScatter
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.rank_streams import ReceiveFromRank, SendToRank
from ipu_dynamo.program.ir.types import TensorType, byte_text
from ipu_dynamo.program.ir.values import Variable
from ipu_dynamo.program.local_program import check_streams, local_program, message_type
from ipu_dynamo.program.replica_tree import GATHERED_BYTES, subtrees
from ipu_dynamo.program.schedule.dependencies import changed_by_replicas
from ipu_dynamo.program.schedule.planning import schedule_of
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.program.schedule.stage_passes import exchanges_of_passes
from ipu_dynamo.program.share import OwnReplicas, Share

_MESH = re.compile(r"(\d+)x(\d+)")
_CELL = 16  # bytes: a value in a gathered message begins at a multiple


@dataclass(frozen=True, slots=True)
class Wire:
    """A stream from a rank to another one of its row.

    Args:
        number: of the copy that it stands for.
        value: its name on the sender.
        ipu, to: of the sender and the receiver.
        messages: in a step.
    """

    number: int
    value: str
    type: TensorType
    ipu: int
    to: int
    messages: int

    @property
    def nbytes(self) -> int:
        """The bytes of all messages of a step, without their heads."""
        return self.messages * self.type.nbytes

    def __str__(self) -> str:
        where = f"ipu{self.ipu} -> ipu{self.to}"
        times = "1 message" if self.messages == 1 else f"{self.messages} messages"
        what = f"wire {self.number} of %{self.value}: {self.type}"
        return f"{what}, {times} of {self.type.nbytes} bytes  {where}"


@dataclass(frozen=True, slots=True)
class SumExchange:
    """A sum over replicas at the end of a step, with the other ranks of the column.

    Args:
        sum: the instruction.
        nbytes: of the values.
        sent, received: bytes of this rank.
    """

    sum: AllReduce | ReduceScatter
    nbytes: int
    sent: int
    received: int


class RankPlan:
    """The shares of the ranks of a mesh, and their messages in a step.

    Args:
        program: as it was printed.
        rows, columns: of the mesh.

    Raises:
        CompileError: the mesh cannot divide the program.
    """

    def __init__(self, program: Program, rows: int, columns: int) -> None:
        if program.replicas % rows:
            raise CompileError(
                f"the program has {program.replicas} replicas, and the mesh {rows} rows",
                hint="compile it for a multiple of them",
            )
        self.program, self.share = program, Share(rows, columns, 0, 0)
        self.locals = [
            local_program(program, Share(rows, columns, 0, column)) for column in range(columns)
        ]
        check_streams(self.locals)
        self._cut = sections(program)

    @cached_property
    def rows(self) -> list[range]:
        """The replicas of each row."""
        share = self.share
        return [
            share.of_rank(row * share.columns).replicas(self.program.replicas)
            for row in range(share.rows)
        ]

    def ipus(self, column: int) -> range:
        """The IPUs of a column."""
        return self.share.of_rank(column).ipus(self.program.num_ipus)

    def variables(self, column: int) -> list[tuple[Variable, int]]:
        """The variables of a rank, each with the number of its tensors there."""
        own = OwnReplicas(self.rows[0], self.program.replicas)
        return [(v, len(own.holders(v))) for v in self.locals[column].variables]

    def functions(self, column: int) -> list[str]:
        """The functions that the ranks of a column compile."""
        called = {getattr(i, "function", None) for i in self.locals[column].walk()}
        every = (*self.program.functions, *self.program.update_functions)
        return [function.name for function in every if function.name in called]

    def sent(self, column: int) -> list[Wire]:
        """The wires from a rank to others of its row."""
        return [
            self._wire(i, i.value, i.ipu, i.to)
            for i in self.locals[column].walk()
            if isinstance(i, SendToRank)
        ]

    def received(self, column: int) -> list[Wire]:
        """The wires to a rank from others of its row."""
        sent = [wire for each in range(self.share.columns) for wire in self.sent(each)]
        names = {wire.number: wire.value for wire in sent}
        return [
            self._wire(i, names[i.wire], i.origin, i.ipu)
            for i in self.locals[column].walk()
            if isinstance(i, ReceiveFromRank)
        ]

    def _wire(self, stream: SendToRank | ReceiveFromRank, value: str, ipu: int, to: int) -> Wire:
        before, loop = len(self._cut.before), len(self._cut.loop)
        times = self._cut.micro_batches if before <= stream.wire < before + loop else 1
        if stream.each:
            times *= len(self.rows[0])
        return Wire(stream.wire, value, stream.type, ipu, to, times)

    def collectives(self, rank: int) -> list[tuple[Collective, int, int, int]]:
        """The collectives of replicas for which a rank sends the others of its column messages.

        Returns:
            For each, how many messages it sends in a step, and the bytes that it sends and gets.
        """
        share, replicas = self.share.of_rank(rank), self.program.replicas
        own, found = self.rows[share.row], []
        others = [block for block in self.rows if block != own]
        for each in self.locals[share.column].walk():
            if not isinstance(each, Collective) or not others:
                continue
            if each.groups is not None and each.groups.are_whole(replicas, len(own)):
                continue
            times = self._cut.micro_batches
            sent = sum(message_type(each, replicas, own, block).nbytes for block in others)
            received = sum(message_type(each, replicas, block, own).nbytes for block in others)
            found.append((each, times * len(others), times * sent, times * received))
        return found

    def exchanges(self, rank: int) -> list[SumExchange]:
        """The sums at the end of a step that a rank makes with the others of its column."""
        share, replicas = self.share.of_rank(rank), self.program.replicas
        if share.rows == 1:
            return []
        counts = [len(subtrees(replicas, block)) for block in self.rows]
        types = {v.name: v.type for v in self.program.variables}
        found = []
        for instruction in self.locals[share.column].walk():
            if isinstance(instruction, AllReduce | ReduceScatter) and instruction.groups is None:
                values = [types[name] for name in instruction.values]
                sent, received = exchanged_bytes(values, counts, share.row)
                nbytes = sum(type.nbytes for type in values)
                found.append(SumExchange(instruction, nbytes, sent, received))
        return found

    def of_first_replica(self, column: int) -> int:
        """The bytes that the first rank of a column sends to each of the others at a step's end.

        They are values that the model takes from replica 0 alone, such as running statistics.
        """
        program = self.locals[column]
        names = changed_by_replicas(program) if self.share.rows > 1 else ()
        return sum(_padded(v.type.nbytes) for v in program.variables if v.name in names)

    def results(self, column: int) -> dict[str, int]:
        """The results that the ranks of a column give the others of their row, once a call.

        Returns:
            By the name of the stream, the bytes for each of them.
        """
        if self.share.columns == 1:
            return {}
        cut, trains = self._cut, self.program.kind == "training"
        iterations, accumulation = (
            (cut.steps, cut.micro_batches) if trains else (cut.micro_batches, 1)
        )
        own = len(self.rows[0])
        times = {
            "all": iterations * accumulation * own,
            "final": own,
            "sum": own,
            "once": 1,
        }
        return {
            output.name: output.type.nbytes
            * times.get(output.returns, iterations // output.period * accumulation * own)
            for output in self.locals[column].outputs
            if output.printing is None
        }

    @property
    def votes(self) -> int:
        """How often the ranks vote in a step: in training, and if they send each other values."""
        trains, share = self.program.kind == "training", self.share
        exchanges = share.columns > 1 or self._collectives or changed_by_replicas(self.program)
        return int(share.ranks > 1 and (trains or bool(exchanges)))

    @property
    def _collectives(self) -> bool:
        return bool(exchanges_of_passes(self._cut.loop))

    def check_schedule(self) -> int:
        """Follow the schedule of a row without computing; returns its number of workers.

        Raises:
            CompileError: workers would wait for each other; see `Schedule.check`.
        """
        replicas = self.program.replicas if self._collectives else len(self.rows[0])
        schedule = schedule_of(
            self.program,
            micro_batches=self._cut.micro_batches,
            replicas=replicas,
            workers=None,
            share=self.share,
        )
        schedule.check(self.program, replicas=replicas)
        return len(schedule.workers)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        program, share = self.program, self.share
        yield (
            f"rank plan: {_count(share.ranks, 'rank')}, {_count(share.rows, 'row')} x "
            f"{_count(share.columns, 'column')}; a step of {program.kind} has "
            f"{_count(self._cut.micro_batches, 'micro-batch', 'micro-batches')} on each of "
            f"{_count(program.replicas, 'replica')}"
        )
        own = len(self.rows[0])
        replicas = f"replicas {own} * r to {own} * r + {own - 1}" if own > 1 else "replica r"
        yield f"  row r has {replicas}; its rank in column c is {share.columns} * r + c"
        for column in range(share.columns):
            yield from self._of_column(column)
        if self.votes:
            along = [name for name, n in (("row", share.columns), ("column", share.rows)) if n > 1]
            yield f"  1 vote in a step, along the {' and the '.join(along)}"
        yield f"  the schedule of a row, {_count(self.check_schedule(), 'worker')}, has no cycle"

    def _of_column(self, column: int) -> Iterator[str]:
        ipus, held = self.ipus(column), self.variables(column)
        nbytes = sum(variable.type.nbytes * tensors for variable, tensors in held)
        functions = self.functions(column)
        yield f"  column {column}: {_range('IPU', ipus)}"
        yield f"    {_count(len(held), 'variable')} of {byte_text(nbytes)} on each rank"
        yield f"    {_count(len(functions), 'function')} to compile: {', '.join(functions)}"
        for title, wires in (("sends", self.sent(column)), ("receives", self.received(column))):
            if wires:
                messages = _count(sum(wire.messages for wire in wires), "message")
                total = byte_text(sum(wire.nbytes for wire in wires))
                yield f"    {title} {messages} of {total} in a step"
                yield from (f"      {wire}" for wire in wires)
        if results := self.results(column):
            others = _count(self.share.columns - 1, "rank")
            yield (
                f"    gives {_count(len(results), 'result')} of {byte_text(sum(results.values()))} "
                f"to {others} of its row, once a call"
            )
        ranks = self.share.of_rank(column).of_column
        for of_each in zip(*map(self.collectives, ranks), strict=True):
            each, messages, *_ = of_each[0]
            yield (
                f"    {each.kind} of %{each.value}: sends {_count(messages, 'message')} "
                f"of {_bytes({sent for _, _, sent, _ in of_each})} in a step, receives "
                f"{_bytes({received for *_, received in of_each})}"
            )
        for of_rows in zip(*map(self.exchanges, ranks), strict=True):
            first = of_rows[0]
            name = "all_reduce" if isinstance(first.sum, AllReduce) else "reduce_scatter"
            values = f"{_count(len(first.sum.values), 'value')}, {byte_text(first.nbytes)}"
            yield (
                f"    {name} of {values}: sends {_bytes({e.sent for e in of_rows})}, receives "
                f"{_bytes({e.received for e in of_rows})}"
            )
        if nbytes := self.of_first_replica(column):
            yield f"    row 0 sends buffers of replica 0 to all others: {byte_text(nbytes)}"


def exchanged_bytes(
    types: Sequence[TensorType], counts: Sequence[int], row: int
) -> tuple[int, int]:
    """The bytes that a rank sends and receives to sum values over the ranks of its column.

    Args:
        counts: partial sums of each rank.
        row: of the rank.

    Source: `runtime/ranks/replica_sums.py`, which makes these messages.
    """
    others, sent, received, small = len(counts) - 1, 0, 0, 0
    for dtype in dict.fromkeys(type.dtype for type in types):
        own = [type for type in types if type.dtype == dtype]
        if sum(type.nbytes for type in own) <= GATHERED_BYTES:
            small += sum(_padded(type.nbytes) for type in own)
            continue
        elements = sum(type.nbytes for type in own) // dtype.itemsize
        part = -(-elements // len(counts)) * dtype.itemsize
        sent += others * (counts[row] + 1) * part  # partial sums out, then the own part of the sum
        received += (sum(counts) - counts[row] + others) * part
    gathered = others * max(counts) * small
    return sent + gathered, received + gathered


def _padded(nbytes: int) -> int:
    return -(-nbytes // _CELL) * _CELL


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _range(what: str, numbers: range) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def _bytes(several: set[int]) -> str:
    """One number of bytes, or the least and the largest: rows may have other partial sums."""
    least, most = min(several), max(several)
    return byte_text(least) if least == most else f"{byte_text(least)} to {byte_text(most)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the result is its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ipu_dynamo.program.rank_plan", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("program", help="a file with the text of a program")
    parser.add_argument("--mesh", required=True, help="rows x columns of the mesh, such as 256x4")
    args = parser.parse_args(arguments)
    shape = _MESH.fullmatch(args.mesh)
    if shape is None or "0" in shape.groups():
        parser.error(f"argument --mesh: {args.mesh!r} is not of the form 256x4")
    try:
        program = Program.parse(Path(args.program).read_text(encoding="utf-8"))
        print(RankPlan(program, *map(int, shape.groups())))
    except (OSError, IpuError, ValueError) as error:
        print(f"{args.program}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
