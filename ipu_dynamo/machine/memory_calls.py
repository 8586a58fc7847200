"""Cut the liveness of an IPU at its calls: equal ones are one block of steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from ipu_dynamo.machine.predicted_memory import HeldValue, Lifetime, MemoryBlock, MemoryCall
from ipu_dynamo.program.liveness import IpuLiveness, LiveTensor


@dataclass(slots=True)
class _CallSteps:
    """The steps of a call on its IPU, up to `stop`.

    Args:
        call, block: positions in the lists of a prediction.
        places: for each step, the place of its operator in the block.
        tensors: those that are live at some step of it and not always, by number on the IPU.
    """

    call: int
    block: int
    start: int
    stop: int
    places: list[int]
    tensors: dict[int, LiveTensor] = field(default_factory=dict)

    def makes(self, tensor: LiveTensor) -> bool:
        return tensor.maker is not None and self.start <= tensor.maker < self.stop

    def passes(self, tensor: LiveTensor) -> bool:
        """Whether a tensor of before is live all through it."""
        through = any(f <= self.start and last >= self.stop - 1 for f, last in tensor.spans)
        return through and not self.makes(tensor)

    def lifetime(self, tensor: LiveTensor) -> Lifetime:
        made = self.places[tensor.maker - self.start] if self.makes(tensor) else -1  # type: ignore[operator]
        last = max(last for first, last in tensor.spans if first < self.stop and last >= self.start)
        ends = last < self.stop and (tensor.reader is None or tensor.reader < self.stop)
        end = self.places[last - self.start] if ends else -1
        return Lifetime(tensor.name, str(tensor.type), tensor.nbytes, made, end)

    def changing(self) -> list[int]:
        """Bytes at each step of the tensors that are not live all through it."""
        change = [0] * (len(self.places) + 1)
        for tensor in self.tensors.values():
            for first, last in () if self.passes(tensor) else tensor.spans:
                if first < self.stop and last >= self.start:
                    change[max(first - self.start, 0)] += tensor.nbytes
                    change[min(last + 1, self.stop) - self.start] -= tensor.nbytes
        return list(accumulate(change[:-1]))

    def by_place(self, nbytes: Sequence[int]) -> tuple[int, ...]:
        """The most of the steps of each operator: a loop has those of its body."""
        most = [0] * (max(self.places, default=-1) + 1)
        for place, value in zip(self.places, nbytes, strict=True):
            most[place] = max(most[place], value)
        return tuple(most)


def memory_calls(
    live: IpuLiveness, blocks_of_calls: Mapping[int, tuple[int, int]], temporaries: Sequence[int]
) -> tuple[tuple[MemoryBlock, ...], tuple[MemoryCall, ...]]:
    """The memory of an IPU during each of its calls.

    Args:
        blocks_of_calls: the position of a call and that of its block, by its number.
        temporaries: bytes of the IPU at each step.
    """
    blocks: dict[MemoryBlock, int] = {}
    made: dict[int, HeldValue] = {}  # by number of the tensor
    calls = []
    for call in _calls(live, blocks_of_calls):
        held = {n: tensor for n, tensor in call.tensors.items() if call.passes(tensor)}
        own = [(n, tensor) for n, tensor in call.tensors.items() if n not in held]
        for position, (number, tensor) in enumerate(own):
            if call.makes(tensor):
                made[number] = HeldValue(call.call, position)
        block = MemoryBlock(
            call.block,
            call.by_place(call.changing()),
            call.by_place(temporaries[call.start : call.stop]),
            tuple(call.lifetime(tensor) for _, tensor in own),
        )
        values = tuple(made[number] for number in held if number in made)
        nbytes = sum(tensor.nbytes for tensor in held.values())
        calls.append(MemoryCall(call.call, blocks.setdefault(block, len(blocks)), nbytes, values))
    return tuple(blocks), tuple(calls)


def _calls(live: IpuLiveness, blocks_of_calls: Mapping[int, tuple[int, int]]) -> list[_CallSteps]:
    """The calls of an IPU in order; of two micro-batches on their way, those of the first."""
    calls, start = [], 0
    for (number, micro_batch), group in groupby(
        live.steps, key=lambda step: (step.number, step.micro_batch)
    ):
        places = [step.place for step in group]
        stop = start + len(places)
        if number in blocks_of_calls and micro_batch == 0:
            calls.append(_CallSteps(*blocks_of_calls[number], start, stop, places))
        start = stop
    call_of = [0] * (len(live.steps) + 1)  # how many calls begin before each step
    for call in calls:
        call_of[call.start] += 1
    begun = list(accumulate(call_of))
    for n, tensor in enumerate(live.tensors):
        for first, last in tensor.spans:
            for call in calls[max(begun[first] - 1, 0) : begun[last]]:
                if first < call.stop:
                    call.tensors[n] = tensor
    return calls
