"""Refuse a program that cannot run as it reads.

The body of a training program is one loop over device iterations. In it are the instructions before
the micro-batches, one loop over these, and the end of the step. Other programs have no outer loop
and no end of a step. Every name stands for one value. It is made before it is read, on the IPU that
reads it, with the expected type. Functions do not write to their inputs: only instructions write
variables. A result that is kept or written has memory of its own.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ipu_dynamo.errors import ProgramError
from ipu_dynamo.program.ir.instructions import Plain
from ipu_dynamo.program.ir.verify.conditions import Scope, check_conditions
from ipu_dynamo.program.ir.verify.memory import MemoryChecks
from ipu_dynamo.program.ir.verify.residence import Residence
from ipu_dynamo.program.ir.verify.shape import check_loops, check_tables
from ipu_dynamo.program.ir.verify.writes import WriteChecks
from ipu_dynamo.program.schedule.sections import sections

if TYPE_CHECKING:
    from ipu_dynamo.program.ir.program import Program


def verify(program: "Program") -> None:
    """Check a whole program.

    Raises:
        ProgramError: what is wrong, and in which instruction.
    """
    try:
        check_tables(program)
        check_loops(program)
    except ProgramError:
        raise
    except ValueError as error:
        raise ProgramError(str(error)) from error
    _Verifier(program).run()


class _Verifier:
    """Walks through a program once, and checks each instruction by its description."""

    def __init__(self, program: "Program") -> None:
        self.program = program
        functions = {function.name: function for function in program.functions}
        update_functions = {f.name: f for f in program.update_functions}
        self.has = Residence(program)
        self.scope = Scope(program, self.has, functions, update_functions)
        self.writes = WriteChecks(self.has)
        self.memory = MemoryChecks(functions)

    def run(self) -> None:
        cut = sections(self.program)
        self.check_all(cut.before)
        before = set(self.has.values)
        self.check_all(cut.loop)
        if missing := self.has.outputs.keys() - self.has.sent:
            raise ProgramError(f"nothing is sent to the output {min(missing)}")
        self.has.forget(set(self.has.values) - before)
        self.check_all(cut.after)
        if self.has.fetched:
            name, ipu = min(self.has.fetched)
            raise ProgramError(f"%{name} is loaded to ipu{ipu}, and not stored again")
        if self.has.stale:
            raise ProgramError(f"%{min(self.has.stale)} was updated in shards, and is not gathered")

    def check_all(self, instructions: Iterable[Plain]) -> None:
        for instruction in instructions:
            try:
                self.check(instruction)
            except ProgramError:
                raise
            except ValueError as error:
                raise ProgramError(str(error), instruction) from error

    def check(self, instruction: Plain) -> None:
        """Check the columns, uses and moves of an instruction, and note its results."""
        for what, column in instruction.columns:
            of, first = instruction.columns[0]
            if len(column) != len(first):
                raise ValueError(f"{len(first)} {of} have {len(column)} {what}")
        reads, writes, moves = instruction.reads, instruction.writes, instruction.moves
        for use in writes:
            self.has.check(use)
            self.has.check_owner(use)
        for use in reads:
            if use.own_pass and use.name not in self.writes.made:
                raise ValueError(f"%{use.name} is no result of this stage pass")
            self.has.check(use)
        for move in moves:
            if move.src != "replicas":
                self.has.move(move, instruction)
        check_conditions(instruction, self.scope)
        for use in instruction.makes:
            if use.type is not None:
                self.has.define(use.name, use.ipu, use.type, instruction)
        self.writes.follow(instruction)
        self.memory.follow(instruction, reads, moves)
