"""Cut a program into the parts of ranks, with streams between them in place of copies.

A rank has the instructions of its IPUs. A copy from an IPU of another rank is a stream that comes
from it. The numbers for traced updates (`UpdateFactors`) are made on every rank, and copied there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ipu_dynamo.errors import CompileError
from ipu_dynamo.program.ir.collectives import Collective
from ipu_dynamo.program.ir.instructions import Call, Copy, Plain, Receive, Send
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.rank_streams import ReceiveFromRank, SendToRank
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_instructions import Update, UpdateFactors
from ipu_dynamo.program.ir.update_rules import HostStep
from ipu_dynamo.program.ir.values import Variable
from ipu_dynamo.program.replica_tree import subtrees
from ipu_dynamo.program.schedule.sections import sections, with_sections
from ipu_dynamo.program.schedule.stage_passes import stage_passes
from ipu_dynamo.program.share import Share

_TOGETHER = "let one stage have what shares it, or give the mesh fewer ranks in its dimension ipu"


def local_program(program: Program, share: Share) -> Program:
    """Return the part of a program that a rank runs, for all replicas.

    Raises:
        CompileError: the program has fewer IPUs than the mesh has columns, or another rank needs a
            value on this one's IPUs that no copy brings.
    """
    if program.num_ipus < share.columns:
        raise CompileError(
            f"the program is on {program.num_ipus} IPUs, and the mesh has {share.columns} ranks in "
            "its dimension ipu",
            hint="cut the model into more stages, or give the mesh fewer ranks in that dimension",
        )
    own = range(program.num_ipus) if share.columns == 1 else share.ipus(program.num_ipus)
    if len(own) == program.num_ipus:
        return program
    cut, parts = sections(program), _Parts(program, own)
    first, last = len(cut.before), len(cut.before) + len(cut.loop)
    before = parts.of(cut.before, 0)
    loop = parts.of_loop(cut.loop, first)
    after = parts.of(cut.after, last)
    received = {i.stream for i in loop if isinstance(i, Receive)}
    sent = {i.stream for i in loop if isinstance(i, Send)}
    return replace(
        with_sections(program, before=before, loop=loop, after=after),
        variables=tuple(parts.variables.values()),
        inputs=tuple(stream for stream in program.inputs if stream.name in received),
        outputs=tuple(stream for stream in program.outputs if stream.name in sent),
    )


@dataclass(frozen=True, slots=True)
class _Value:
    """Where a variable is, or a value outside of the loop.

    Args:
        each: each replica has its own; else all of a rank share one.
        anywhere: every rank has it.
        strides: of a variable.
    """

    each: bool
    anywhere: bool = False
    strides: tuple[int, ...] | None = None


class _Parts:
    """The instructions of a rank.

    Args:
        own: the rank's IPUs.

    Attributes:
        variables: those of the rank, by name.
    """

    def __init__(self, program: Program, own: range) -> None:
        self._program, self._own = program, own
        factors = [i for i in program.walk() if isinstance(i, UpdateFactors)]
        counters = {name for i in factors for name in i.counters}
        self.variables: dict[str, Variable] = {}
        self._values: dict[str, _Value] = {}
        for variable in program.variables:
            if variable.ipu in own or variable.name in counters:
                self.variables[variable.name] = variable
            each = not variable.replicated or variable.groups is not None
            self._values[variable.name] = _Value(each, strides=variable.strides)
        number = _Value(each=False, anywhere=True)
        self._values |= {name: number for i in factors for name in i.results}
        self._others = {v.name for v in program.variables} - self.variables.keys()

    def of(self, instructions: Sequence[Plain], first: int) -> list[Plain]:
        """Those of the rank, before or after the micro-batches.

        Args:
            first: the number of the first one among all of a step.
        """
        local: list[Plain] = []
        for number, instruction in enumerate(instructions, first):
            if not isinstance(instruction, Copy):
                local += self._kept(instruction)
                continue
            value = self._values.get(instruction.value, _Value(each=False))
            self._values[instruction.result] = value
            local += self._copied(instruction, number, value)
        return local

    def of_loop(self, instructions: Sequence[Plain], first: int) -> list[Plain]:
        """Those of the rank within a micro-batch. It receives a value before the first call of the
        IPU that waits for it; weight gradients that are calls of their own do not wait."""
        calls = [i for i in instructions if isinstance(i, Call)]
        arrivals: dict[int, list[Plain]] = {}  # by the number of a call
        local: list[Plain] = []
        passed = 0
        for number, instruction in enumerate(instructions, first):
            if isinstance(instruction, Call):
                if instruction.ipu in self._own:
                    local += arrivals.pop(passed, [])
                local += self._kept(instruction)
                passed += 1
            elif isinstance(instruction, Copy):
                (moved,) = self._copied(instruction, number, _Value(each=True)) or (None,)
                reader = next(
                    (
                        place
                        for place, call in enumerate(calls[passed:], passed)
                        if call.ipu == instruction.dst and call.direction != "weights"
                    ),
                    None,
                )
                if moved is None:
                    continue
                if isinstance(moved, Copy):
                    local.append(moved)
                elif reader is None:
                    continue  # no rank reads it
                elif not passed or calls[passed - 1].ipu != instruction.src:
                    raise CompileError(
                        f"%{instruction.value} on ipu{instruction.src} changes in each micro-batch,"
                        f" and ipu{instruction.dst} of another rank reads it",
                        where=instruction.source,
                        hint=_TOGETHER,
                    )
                elif isinstance(moved, SendToRank):
                    local.append(moved)
                else:
                    arrivals.setdefault(reader, []).append(moved)
            else:
                local += self._kept(instruction)
        whole = [of for of in stage_passes(calls) if of[0].ipu in self._own]
        if len(stage_passes([i for i in local if isinstance(i, Call)])) != len(whole):
            raise CompileError(
                "two passes of one stage have only passes of other ranks between them",
                where=whole[0][0].source,
                hint=_TOGETHER,
            )
        return local

    def _kept(self, instruction: Plain) -> list[Plain]:
        """The instruction, if it is the rank's."""
        if isinstance(instruction, UpdateFactors):
            return [instruction]
        here = {ipu in self._own for ipu in instruction.ipus}
        if here == {False}:
            return []
        names = {*instruction.read_names, *instruction.written_names}
        if (fetched := instruction.fetches) in self._others:
            raise CompileError(
                f"%{fetched} is in streaming memory, which the ranks of its IPU have, and another "
                f"rank needs it on ipu{instruction.ipus[0]}",
                hint="keep weights that several IPUs read on the chip",
            )
        if here != {True} or not names.isdisjoint(self._others):
            problem = f"a rank cannot do this alone: {instruction}"
            raise CompileError(problem, hint=_TOGETHER)
        if isinstance(instruction, Update) and isinstance(instruction.rule, HostStep):
            raise CompileError(
                "an optimiser whose step runs in Python needs all parameters, and a rank has those "
                "of its IPUs",
                hint="leave out update='host', or the dimension ipu of the mesh",
            )
        return [instruction]

    def _copied(self, copy: Copy, number: int, value: _Value) -> list[Plain]:
        """The instructions of a rank in place of a copy."""
        from_here, to_here = copy.src in self._own or value.anywhere, copy.dst in self._own
        if from_here and to_here:
            return [copy]
        if to_here:
            return [
                ReceiveFromRank(
                    number, copy.result, copy.type, copy.dst, copy.src, value.each, copy.source,
                    value.strides,
                )
            ]  # fmt: skip
        if from_here and not value.anywhere:
            return [
                SendToRank(
                    number, copy.value, copy.type, copy.src, copy.dst, value.each, copy.source
                )
            ]
        return []


def message_type(
    collective: Collective, replicas: int, sender: range, receiver: range
) -> TensorType:
    """The type of a rank's message to another one of its column, for a collective's micro-batch.

    Args:
        sender, receiver: the replicas of the ranks.
    """
    type_ = collective.type
    match collective.kind:
        case "all_gather":
            shape = (len(sender), *type_.shape)
        case "all_reduce":
            shape = (len(subtrees(replicas, sender)), *type_.shape)
        case "all_to_all":
            rows, *rest = type_.shape
            shape = (len(sender), len(receiver) * (rows // replicas), *rest)
    return TensorType(type_.dtype, shape)


def check_streams(programs: Sequence[Program]) -> None:
    """Check that each stream between the ranks of a row has one sender and one receiver.

    Args:
        programs: of all ranks of a row.

    Raises:
        AssertionError: one has not, or the messages differ.
    """
    sent: dict[int, tuple[object, ...]] = {}
    received: dict[int, tuple[object, ...]] = {}
    for program in programs:
        for number, i in _streams(program).items():
            ends = sent if isinstance(i, SendToRank) else received
            assert number not in ends, f"two ranks have this: {i}"
            other = (i.ipu, i.to) if isinstance(i, SendToRank) else (i.origin, i.ipu)
            ends[number] = *other, i.type, i.each
    assert sent == received, f"streams between ranks differ: {sent}, {received}"


def _streams(program: Program) -> Mapping[int, SendToRank | ReceiveFromRank]:
    return {i.wire: i for i in program.walk() if isinstance(i, SendToRank | ReceiveFromRank)}
