"""Decide when tensors are live, from the steps that make and read them.

A value that a later slot of a pipeline reads is kept in a stash. The stash has room for as many
micro-batches as there are slots from the first to the last reader. If more micro-batches wait for
their weight gradients at the end of a step, it has room for those. Until the pass that makes it
ends, the value is an activation, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ipu_dynamo.program.ir.instructions import Load
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.liveness.live_tensors import IpuLiveness, LiveStep, LiveTensor, Role, Span
from ipu_dynamo.program.machine_operators import MachineOperator

InPlace = Callable[[MachineOperator], bool]


@dataclass(eq=False, slots=True)
class HeldTensor:
    """A tensor under construction.

    Args:
        made: the step that makes it; None: it is always there.
        slot: of a pipeline, where it is made or copied to; None: it is no value of a pipeline.
        weights: a pass for weight gradients makes it.
        arrives: it is copied here at the end of the cycle before.
        before_loop: it is made before the micro-batches, which all read it.
        reads: slot, step, and whether a pass for weight gradients reads it.
        held: further steps at which it is live.
        copies: of a stash.
    """

    name: str
    type: TensorType
    nbytes: int
    role: Role
    made: int | None = None
    slot: int | None = None
    weights: bool = False
    arrives: bool = False
    before_loop: bool = False
    io_tiles: bool = False
    reads: list[tuple[int, int, bool]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    copies: int = 1


Held = tuple[HeldTensor, ...]  # the memory of a value


@dataclass
class IpuSteps:
    """The steps and tensors of an IPU, under construction.

    Args:
        loop: the first step of the micro-batches, and the one after the last.
        ends: for each slot, the last step of its passes, except those for weight gradients.
        runs: steps of operators, each with the memory of its first operand, and its result.
        constants: those of functions, by their texts.
        loaded: variables that are loaded for the next update.
        left: for how many slots it has nothing but weight gradients to do at the end.
        kept: of how many micro-batches a value is kept at once, from a slot to a later one.
    """

    left: int
    kept: Callable[[int, int], int]
    steps: list[LiveStep | None] = field(default_factory=list)
    tensors: list[HeldTensor] = field(default_factory=list)
    loop: Span = (0, 0)
    ends: dict[int, int] = field(default_factory=dict)
    runs: dict[int, tuple[HeldTensor, HeldTensor]] = field(default_factory=dict)
    constants: dict[str, HeldTensor] = field(default_factory=dict)
    loaded: dict[str, Load] = field(default_factory=dict)

    def add(self, tensor: HeldTensor) -> HeldTensor:
        """Hold a tensor."""
        self.tensors.append(tensor)
        return tensor

    def finished(self, ipu: int, in_place: InPlace) -> IpuLiveness:
        """The liveness of the IPU, once all is known that it does."""
        for tensor in list(self.tensors):
            self._span(tensor)
        steps = [step or LiveStep(-1, "") for step in self.steps]
        for step, (operand, result) in sorted(self.runs.items(), key=lambda run: run[0]):
            operator = steps[step].operator
            if operator and _dies(operand, step, result.nbytes) and in_place(operator):
                _give_up(operand, step)
                steps[step] = replace(steps[step], in_place=True)
        tensors = (_live(tensor) for tensor in self.tensors if _exists(tensor))
        return IpuLiveness(ipu, tuple(steps), tuple(tensors))

    def _span(self, tensor: HeldTensor) -> None:
        slot, later = self._slots(tensor)
        last = max(later)
        copies = max(self.kept(slot, of_reader) for of_reader in later)
        waits = any(weights for s, _, weights in tensor.reads if s == last)
        if tensor.slot is not None and waits and not tensor.weights:
            copies = max(copies, 1 + self.left)
        if copies > 1:
            stash = HeldTensor(tensor.name, tensor.type, copies * tensor.nbytes, "stash")
            stash.copies, stash.reads, tensor.copies = copies, tensor.reads, copies
            self.add(stash)
        if tensor.made is None:
            return
        start, steps = tensor.made, [*(step for _, step, _ in tensor.reads), *tensor.held]
        end = max(steps, default=start)
        if copies > 1:
            end = max([self.ends.get(slot, start), *tensor.held])
        tensor.spans = [(start, max(start, end))]
        if copies > 1 and slot not in self.ends:
            return  # nothing runs in the slot, so it waits in the stash at once
        if tensor.arrives and steps:  # until the next cycle, and in it from the start
            first, stop = self.loop
            tensor.spans = [(first, end), (start, stop - 1)] if end < start else [(first, stop - 1)]

    def _slots(self, tensor: HeldTensor) -> tuple[int, set[int]]:
        """The slot in which a tensor is made or first read, and those of its readers.

        In a schedule by name, the reader that runs last need not be that of the last slot.
        """
        slots = [slot for slot, _, _ in tensor.reads]
        if tensor.slot is None or not slots:
            return 0, {0}
        slot = min(slots) if tensor.made is None else tensor.slot
        return slot, {max(slot, of_reader) for of_reader in slots}


def _dies(operand: HeldTensor, step: int, nbytes: int) -> bool:
    """Whether an activation is read last at a step, and has as many bytes as the result there."""
    free = operand.role == "activation" and operand.copies == 1 and operand.nbytes == nbytes
    return free and any(last == step for _, last in operand.spans)


def _give_up(operand: HeldTensor, step: int) -> None:
    spans = [(first, last - (last == step)) for first, last in operand.spans]
    operand.spans = [(first, last) for first, last in spans if first <= last]


def _exists(tensor: HeldTensor) -> bool:
    """Whether it is ever live: a constant that only emulating operators read is not."""
    if tensor.role == "constant":
        return bool(tensor.reads)
    return tensor.made is None or bool(tensor.spans)


def _live(tensor: HeldTensor) -> LiveTensor:
    reader = max(((slot, step) for slot, step, _ in tensor.reads), default=(0, None))[1]
    stash = tensor.role == "stash"
    return LiveTensor(
        tensor.name,
        tensor.type,
        tensor.nbytes,
        tensor.role,
        tensor.copies if stash else 1,
        tuple(tensor.spans),
        tensor.made,
        reader,
        tensor.io_tiles,
    )
