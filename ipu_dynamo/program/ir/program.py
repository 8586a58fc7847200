"""Define the program: passes emit it, the runtime executes it, and users read it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import attrgetter
from typing import Literal, Self

from torch import Tensor

from ipu_dynamo.errors import ProgramError
from ipu_dynamo.options import SyncPattern
from ipu_dynamo.program.ir.function import Function
from ipu_dynamo.program.ir.instructions import Call, Copy, Instruction, Order, Repeat
from ipu_dynamo.program.ir.types import byte_text, counted
from ipu_dynamo.program.ir.values import Input, Output, Variable
from ipu_dynamo.program.ir.verify.program import verify
from ipu_dynamo.program.schedule.stash import Stash, stash
from ipu_dynamo.program.text.program_text import line_error, parse_text, write_text
from ipu_dynamo.program.text.short_text import folded
from ipu_dynamo.program.traffic import Traffic, exchanged, traffic


@dataclass(frozen=True, slots=True)
class Program:
    """An explicit multi-IPU program: one replica's instructions.

    Args:
        kind: `training` updates parameters, `inference` does not; `forward` and `backward` are
            the two passes of a model whose loss and update are outside.
        num_ipus: IPUs of one replica.
        replicas: how many replicas run the same instructions on different data.
        variables: the tensors that are kept between calls, in the order of the user's module.
        inputs, outputs: host streams.
        functions: distinct stage functions, by first call.
        body: the instructions of one call.
        io_tiles: tiles of each IPU that only transfer.
        memory_proportions: the share of an IPU's memory that a product may use for temporary
            values, for each IPU; empty: 0.6.
        sync_pattern: which IPUs take part in a barrier.
        update_functions: distinct functions of traced updates.
        recomputed: why operators of the forward pass are repeated, where they are: the user `asked`
            to save memory, on this computer, too; or it is the `default` for IPUs.
    """

    kind: Literal["training", "inference", "forward", "backward"]
    num_ipus: int
    replicas: int
    variables: tuple[Variable, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    functions: tuple[Function, ...]
    body: tuple[Instruction, ...]
    io_tiles: int = 0
    update_functions: tuple[Function, ...] = ()
    memory_proportions: tuple[float, ...] = ()
    sync_pattern: SyncPattern = "full"
    recomputed: Literal["default", "asked"] = "asked"

    def walk(self) -> Iterator[Instruction]:
        """Every instruction once, in program order, loops before their bodies.

        Its position here is the number of an instruction.
        """
        return _walk(self.body)

    def numbered_calls(self) -> dict[int, Call]:
        """The calls by number."""
        return {n: i for n, i in enumerate(self.walk()) if isinstance(i, Call)}

    def with_instructions(self, new: Mapping[int, Sequence[Instruction]]) -> Self:
        """The program with other instructions, any number of them, in place of some.

        Args:
            new: by the number of an instruction other than a loop.
        """
        numbers = count()

        def rewritten(body: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
            instructions: list[Instruction] = []
            for instruction in body:
                instructions += new.get(next(numbers), (instruction,))
                if isinstance(instruction, Repeat):
                    instructions[-1] = replace(instruction, body=rewritten(instruction.body))
            return tuple(instructions)

        return replace(self, body=rewritten(self.body))

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(self.numbered_calls().values())

    @property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(i for i in self.walk() if isinstance(i, Copy))

    def function(self, name: str) -> Function:
        """The stage function of this name."""
        return next(function for function in self.functions if function.name == name)

    def update_function(self, name: str) -> Function:
        """The function of traced updates of this name."""
        return next(function for function in self.update_functions if function.name == name)

    @property
    def num_stages(self) -> int:
        """How many stages the program has; a stage's two passes count once."""
        return len({call.stage for call in self.calls})

    @property
    def traffic(self) -> Traffic:
        """Bytes between IPUs and streaming memory, and between replicas, in one call; of all
        replicas together."""
        return traffic(self.body) * self.replicas

    @property
    def order(self) -> Order:
        """How micro-batches follow each other."""
        loops = [i for i in self.walk() if isinstance(i, Repeat) and i.over == "micro_batch"]
        return loops[0].order if loops else "sequential"

    @property
    def schedule(self) -> str:
        """The name of a training pipeline's order; "" is PopTorch's."""
        loops = (i for i in self.walk() if isinstance(i, Repeat) and i.over == "micro_batch")
        return next((loop.schedule for loop in loops), "")

    @property
    def stash(self) -> tuple[Stash, ...]:
        """For each stage of a training pipeline, the values that it keeps for its backward pass."""
        return stash(self)

    def short(self) -> str:
        """Variables by IPU, streams and instructions, without the operators of functions.

        Of a long list it names the first and the last values.
        """
        return "\n".join(
            [
                self._header(),
                *self._memory(),
                *self._streams(),
                *self._stage_lines(),
                *_body_lines(self.body, "  ", short=True),
            ]
        )

    def text(self) -> str:
        """The full form, in ASCII: all of the program but the tensors of its variables."""
        return write_text(self)

    @classmethod
    def parse(cls, text: str, constants: Mapping[str, Tensor] | None = None) -> Self:
        """Inverse of `text`; nothing in it is run or imported.

        Args:
            constants: tensors by name, to be compared with those that the program was made with.

        Raises:
            ValueError: what is wrong, and in which line.
        """
        program = parse_text(text, cls, constants)
        try:
            verify(program)
        except ProgramError as error:
            raise line_error(text, error.instruction or program, error.problem) from error
        return program

    def __str__(self) -> str:
        return self.listing()

    def listing(self, *, here: bool = False) -> str:
        """All of it, for people.

        Args:
            here: this computer runs it, and keeps the values of stages in place of the IPUs.
        """
        every = (*self.functions, *self.update_functions)
        functions = [f"{function}\n{function.listing()}" for function in every]
        variables = [f"  {variable}" for variable in self.variables]
        return "\n".join(
            [
                self._header(),
                *variables,
                *self._streams(),
                *self._stage_lines(here=here),
                *functions,
                "body",
                *_body_lines(self.body, "  "),
            ]
        )

    def _header(self) -> str:
        tiles = f", {self.io_tiles} IO tiles on each IPU" if self.io_tiles else ""
        shares = ", ".join(f"{share:g}" for share in self.memory_proportions)
        memory = f", memory proportions {shares}" if shares else ""
        pattern = self.sync_pattern.replace("_", " ")
        sync = "" if self.sync_pattern == "full" else f", sync pattern {pattern}"
        return (
            f"program {self.kind}: {counted(self.num_stages, 'stage')} on "
            f"{counted(self.num_ipus, 'IPU')}, {counted(self.replicas, 'replica')}, "
            f"{counted(len(self.functions), 'function')}{tiles}{memory}{sync}"
        )

    def _streams(self) -> list[str]:
        return [f"  {stream}" for stream in (*self.inputs, *self.outputs)]

    def _stage_lines(self, *, here: bool = False) -> list[str]:
        """A line for each stage's stash, and for each call that computes operators again."""
        functions = {function.name: function for function in self.functions}
        lines = [f"  {replace(copies, here=here)}" for copies in self.stash]
        for call in sorted(self.calls, key=attrgetter("stage")):
            if repeated := functions[call.function].repetitions:
                stage = f"stage {call.stage} on ipu{call.ipu}"
                why = "by default" if self.recomputed == "default" else "as asked"
                again = (
                    f"computes {counted(repeated, 'operator')} again, {why}, in @{call.function}"
                )
                lines.append(f"  {stage} {again}")
        return lines

    def _memory(self) -> list[str]:
        lines = []
        for ipu in range(self.num_ipus):
            here = [v for v in self.variables if v.ipu == ipu and not v.off_chip]
            lines.append(f"  ipu{ipu}: {_summary(here)}")
        if away := [v for v in self.variables if v.off_chip]:
            lines.append(f"  off chip: {_summary(away)}")
        for (src, dst), nbytes in sorted(exchanged(self.body).items()):
            lines.append(f"  ipu{src} -> ipu{dst}: {nbytes * self.replicas} bytes in a call")
        if self.traffic.off_chip:
            lines.append(f"  streaming memory: {self.traffic.off_chip} in a call")
        if self.traffic.between_replicas:
            lines.append(f"  between replicas: {self.traffic.between_replicas} in a call")
        return lines


def _summary(variables: list[Variable]) -> str:
    """The memory of some variables, and their number by kind."""
    total = sum(v.held.nbytes for v in variables)
    kinds = dict.fromkeys(v.kind for v in variables)
    counts = ", ".join(counted(sum(v.kind == k for v in variables), k) for k in kinds)
    return f"{byte_text(total)} in {counted(len(variables), 'variable')} ({counts})"


def _walk(body: tuple[Instruction, ...]) -> Iterator[Instruction]:
    for instruction in body:
        yield instruction
        if isinstance(instruction, Repeat):
            yield from _walk(instruction.body)


def _body_lines(body: tuple[Instruction, ...], indent: str, *, short: bool = False) -> list[str]:
    lines = []
    for instruction, line in folded(body) if short else ((i, str(i)) for i in body):
        text, source = f"{indent}{line}", getattr(instruction, "source", None)
        lines.append(text if source is None else f"{text:<88}  # {source}")
        if isinstance(instruction, Repeat):
            lines += _body_lines(instruction.body, indent + "  ", short=short)
    return lines
