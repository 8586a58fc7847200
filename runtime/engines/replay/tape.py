"""Turn a recorded run into numbers: the functions to call, and their memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ipu_dynamo.runtime.engines.replay.native_source import MOST_POINTERS
from ipu_dynamo.runtime.engines.replay.recorded import (
    KernelCall,
    MatmulCall,
    NotRecordedError,
    Recorded,
)
from ipu_dynamo.tune.costs import SMALL_MATMUL

ALIGNMENT = 64  # bytes
NOTHING = -1  # no memory
KERNEL, MATMUL = 0, 1


@dataclass(frozen=True, slots=True)
class Signature:
    """The numbers of arguments and results of a step's function, by kind.

    Its arguments are states, constants, received values and further numbers. Its results are new
    states and sent values. Memory has numbers: states, new states, received, sent, constants,
    numbers, temporary memory, and address 0.
    """

    states: int
    constants: int
    received: int
    numbers: int
    sent: int

    @property
    def arguments(self) -> tuple[int, ...]:
        """The memory of each argument."""
        s, r = self.states, self.received
        fixed = 2 * s + r + self.sent
        constants = range(fixed, fixed + self.constants)
        numbers = range(fixed + self.constants, fixed + self.constants + self.numbers)
        return *range(s), *constants, *range(2 * s, 2 * s + r), *numbers

    @property
    def results(self) -> tuple[int, ...]:
        """The memory of each result."""
        s, first = self.states, 2 * self.states + self.received
        return *range(s, 2 * s), *range(first, first + self.sent)

    @property
    def temporary(self) -> int:
        """The memory of values that end with a step."""
        return 2 * self.states + self.received + self.sent + self.constants + self.numbers

    @property
    def absolute(self) -> int:
        """Memory that begins at address 0."""
        return self.temporary + 1


@dataclass(frozen=True)
class Tape:
    """A run that can be repeated with other memory.

    Args:
        calls: four numbers each: kind, address, number of pointers, the first operand.
        operands: of a pointer, memory and bytes from its beginning; after those of a matmul its
            strides and sizes.
        nbytes: of temporary memory.
        constants: tensors whose addresses are among the operands.
        kernels, matmuls: their numbers.
    """

    signature: Signature
    calls: tuple[int, ...]
    operands: tuple[int, ...]
    nbytes: int
    constants: tuple[Tensor, ...]
    kernels: int
    matmuls: int


def tape_of(recorded: Recorded, arguments: Sequence[Tensor], signature: Signature) -> Tape:
    """Return the calls to repeat from a run with these arguments.

    Raises:
        NotRecordedError: a value is in memory that a repetition does not have.
    """
    places = _places(recorded, arguments, signature)
    temporary, nbytes = _temporary(recorded, places)
    calls: list[int] = []
    operands: list[int] = []
    constants = []

    def pointer(tensor: Tensor) -> tuple[int, int]:
        key = tensor.untyped_storage().data_ptr()
        if tensor.numel() == 0:
            raise NotRecordedError("a value has no elements")
        if key in places:
            memory, base = places[key]
            return memory, tensor.data_ptr() - base
        if key in recorded.constants:
            constants.append(tensor)
            return signature.absolute, tensor.data_ptr()
        return signature.temporary, temporary[key] + tensor.data_ptr() - key

    for call in recorded.calls:
        first = len(operands)
        pointers = [pointer(tensor) for tensor in call.tensors]
        if isinstance(call, KernelCall):
            if len(pointers) > MOST_POINTERS:
                raise NotRecordedError(f"a kernel has {len(pointers)} arguments")
            calls += (KERNEL, call.address, len(pointers), first)
            operands += (number for pair in pointers for number in pair)
        else:
            if call.bias is None:
                pointers.append((NOTHING, 0))
            calls += (MATMUL, 0, len(pointers), first)
            operands += (number for pair in pointers for number in pair)
            operands += _sizes(call)
    matmuls = sum(isinstance(call, MatmulCall) for call in recorded.calls)
    return Tape(
        signature,
        tuple(calls),
        tuple(operands),
        nbytes,
        tuple(constants),
        len(recorded.calls) - matmuls,
        matmuls,
    )


def last_read_where_written(tape: Tape, states: Sequence[int]) -> tuple[int, ...]:
    """Return the states without readers after the first kernel that writes their new values."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number in range(0, len(tape.calls), 4):
        _, _, pointers, start = tape.calls[number : number + 4]
        for memory in tape.operands[start : start + 2 * pointers : 2]:
            first.setdefault(memory, number)
            last[memory] = number
    made = [(state, first.get(tape.signature.states + state)) for state in states]
    return tuple(
        state
        for state, call in made
        if call is not None and last.get(state, -1) <= call and tape.calls[call] == KERNEL
    )


def _places(
    recorded: Recorded, arguments: Sequence[Tensor], signature: Signature
) -> dict[int, tuple[int, int]]:
    """Number and address of the memory of arguments and results, by their storage."""
    places = {}
    for memory, tensor in zip(signature.arguments, arguments, strict=True):
        places[tensor.untyped_storage().data_ptr()] = memory, tensor.data_ptr()
    for memory, result in zip(signature.results, recorded.results, strict=True):
        if result is None:
            raise NotRecordedError("a result is missing")
        storage = result.untyped_storage()
        if storage.data_ptr() in places or storage.data_ptr() in recorded.constants:
            raise NotRecordedError("a result shares memory with an argument or another result")
        if result.data_ptr() != storage.data_ptr() or result.numel() == 0:
            raise NotRecordedError("a result is a part of some memory")
        if result.numel() * result.element_size() != storage.nbytes():
            raise NotRecordedError("a result does not fill its memory")
        places[storage.data_ptr()] = memory, storage.data_ptr()
    return places


def _temporary(
    recorded: Recorded, places: dict[int, tuple[int, int]]
) -> tuple[dict[int, int], int]:
    """Place the temporary values of a step; return places by storage, and the bytes of all."""
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, call in enumerate(recorded.calls):
        for tensor in call.tensors:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in places and key not in recorded.constants:
                sizes[key] = storage.nbytes()
                first.setdefault(key, number)
                last[key] = number
    offsets: dict[int, int] = {}
    for key in sizes:  # in the order of their first use
        alive = [other for other in offsets if last[other] >= first[key]]
        offset = 0
        for other in sorted(alive, key=offsets.__getitem__):
            if offset + sizes[key] <= offsets[other]:
                break
            offset = max(offset, offsets[other] + sizes[other])
            offset = -(-offset // ALIGNMENT) * ALIGNMENT
        offsets[key] = offset
    return offsets, max((offsets[key] + sizes[key] for key in sizes), default=0)


def _sizes(call: MatmulCall) -> tuple[int, ...]:
    """Strides and sizes of a matmul.

    Raises:
        NotRecordedError: the library is for others.
    """
    a, b, out = call.a, call.b, call.out
    if any(t.dtype != torch.float32 or not t.is_cpu for t in call.tensors):
        raise NotRecordedError(f"a matmul is {a.dtype}")
    (m, depth), n = a.shape, b.shape[1]
    if 2 * m * n * depth >= SMALL_MATMUL:
        raise NotRecordedError(f"a matmul has {2 * m * n * depth} operations")
    if out.stride(1) != 1 and n > 1:
        raise NotRecordedError("a matmul's result is transposed")
    bias = (0, 0) if call.bias is None else call.bias.stride()
    return (*a.stride(), *b.stride(), out.stride(0), *bias, m, n, depth)
