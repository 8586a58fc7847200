"""Repeat a recorded step without Python: kernels and small matmuls, one after the other."""

import ctypes
import logging
from array import array
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from ipu_dynamo.runtime.engines.replay.native_library import native_library
from ipu_dynamo.runtime.engines.replay.recorded import NotRecordedError
from ipu_dynamo.runtime.engines.replay.tape import (
    ALIGNMENT,
    Signature,
    Tape,
    last_read_where_written,
    tape_of,
)
from ipu_dynamo.runtime.engines.stage import Stage

log = logging.getLogger(__name__)
_ROOM = 4096  # bytes, for an error's message
_CLOSE = 1e-3  # of the largest value of a result: another order of sums, in a trial


class ReplayError(Exception):
    """A kernel raised an error; the message is its own."""


class Replay:
    """A step's function that can be repeated.

    Attributes:
        tape: the calls of a step.
        in_place: states that a step may overwrite while it reads them.
        results: of the recorded run, without values.
    """

    def __init__(
        self,
        tape: Tape,
        arguments: Sequence[Tensor],
        results: Sequence[Tensor],
        library: ctypes.CDLL,
    ) -> None:
        self.tape, self.library = tape, library
        self.in_place: frozenset[int] = frozenset()
        self.results = [tensor.to("meta") for tensor in results]
        self.calls, self.operands = array("q", tape.calls), array("q", tape.operands)
        self._strides = [tensor.stride() for tensor in arguments]

    def overwriting(self, states: Sequence[int]) -> "Replay":
        """The same, whose steps overwrite these states."""
        other = copy(self)
        other.in_place = frozenset(states)
        return other

    def fits(self, arguments: Sequence[Tensor]) -> bool:
        """Whether arguments have the strides of those in the recorded run."""
        return [tensor.stride() for tensor in arguments] == self._strides


class Repetition:
    """Steps of a call, which follow one another.

    Invariant: `values` are the states after `steps` steps, also while a signal's handler
    runs; the first ones are never written. The first step writes its results to other memory. Each
    later step writes the memory of the step before the last, or overwrites that of the last.

    Args:
        states: before the first step.
        received, sent: for each, a tensor for every step.

    Attributes:
        ends: of each complete step, in seconds since its `advance` began.
    """

    def __init__(
        self,
        replay: Replay,
        states: Sequence[Tensor],
        constants: Sequence[Tensor],
        numbers: Sequence[Tensor],
        received: Sequence[Sequence[Tensor]],
        sent: Sequence[Sequence[Tensor]],
        steps: int,
    ) -> None:
        self._replay, self._steps = replay, array("q", [0, 0])  # complete; that failed
        self.ends = array("d", bytes(8 * steps))
        odd = [torch.empty_like(tensor) for tensor in states]
        even = [
            made if steps == 1 or number in replay.in_place else torch.empty_like(made)
            for number, made in enumerate(odd)
        ]
        self._values = states, odd, even
        temporary = torch.empty(replay.tape.nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
        base = -(-temporary.data_ptr() // ALIGNMENT) * ALIGNMENT
        moved = array("q", bytes(8 * steps * (len(received) + len(sent))))
        for place, tensors in enumerate((*received, *sent)):
            moved[place :: len(received) + len(sent)] = _addresses(tensors)
        self._first = array("q", [*_addresses(states), *_addresses(odd)])
        moving = [0] * (len(received) + len(sent))
        fixed = [*_addresses(constants), *_addresses(numbers), base, 0]
        self._memory = array("q", [*self._first, *moving, *fixed])
        self._spare = _addresses(even)
        self._moved = moved
        self._held = temporary, constants, numbers, received, sent
        self._message = ctypes.create_string_buffer(_ROOM)
        self._arguments = (
            _address(replay.calls), len(replay.calls) // 4, _address(replay.operands),
            _address(self._memory), len(states), _address(self._spare),
            len(moving), _address(moved), _address(self._steps), _address(self.ends),
        )  # fmt: skip

    @property
    def steps(self) -> int:
        """How many are complete."""
        return self._steps[0]

    @property
    def values(self) -> Sequence[Tensor]:
        """Return the states after these steps."""
        steps = self.steps
        return self._values[0 if steps == 0 else 2 - steps % 2]

    def advance(self, end: int, seconds: float) -> None:
        """Make further steps, until so many are complete or that time has passed.

        Raises:
            ReplayError: a kernel failed. The steps before are complete: they are made once more, as
                the failing one may have overwritten a part of the states.
        """
        if self._advance(end, seconds):
            error = ReplayError(self._message.value.decode(errors="replace"))
            failed = self._steps[1]
            self._memory[: len(self._first)] = self._first
            self._spare[:] = _addresses(self._values[2])
            while self._steps[0] < failed and not self._advance(failed, seconds):
                pass
            raise error

    def _advance(self, end: int, seconds: float) -> int:
        """Whether a kernel failed."""
        nanoseconds = int(seconds * 1e9)
        library = self._replay.library
        failed: int = library.ipu_replay(*self._arguments, end, nanoseconds, self._message, _ROOM)
        return failed


def replay_of(
    stage: Stage, arguments: Sequence[Tensor], signature: Signature, overwrites: Sequence[int]
) -> Replay | str:
    """Return a replay of the function of a step, or the reason against one.

    Args:
        stage: the function, in Inductor's code.
        arguments: as it gets them; their values are not read.
        overwrites: states whose memory the new ones may take, as far as the graph says.
    """
    from ipu_dynamo.runtime.engines.private.record_run import (
        record_run,  # Inductor: a second to import
    )

    examples = [_example(tensor, number) for number, tensor in enumerate(arguments)]
    copies = [tensor.clone() for tensor in examples]
    try:
        recorded = record_run(stage, examples)
        tape = tape_of(recorded, examples, signature)
    except NotRecordedError as error:
        return str(error)
    library = native_library()
    if library is None:
        return "no compiler makes the library that repeats steps"
    results = [result for result in recorded.results if result is not None]
    replay = Replay(tape, examples, results, library)
    states = zip(examples[: signature.states], results[: signature.states], strict=True)
    if any(before.stride() != after.stride() for before, after in states):
        return "a state has another layout behind a step"
    s = signature.states
    try:
        with torch.no_grad():
            expected = [t for t in stage([*results[:s], *examples[s:]]) if t is not None]
    except Exception as error:
        return f"a second trial raised {type(error).__name__}: {error}"
    try:
        first, second = _two_steps(replay, examples)
        free = last_read_where_written(tape, overwrites)
        kept = [n for n in free if _same_steps(replay.overwriting([n]), examples, second)]
        in_place = replay.overwriting(kept)
        is_same = _same_steps(in_place, examples, second)
    except ReplayError as error:
        return f"a trial failed: {error}"
    if not all(map(torch.equal, copies, examples)):
        return "it writes an argument"
    if not (all(map(_close, first, results)) and all(map(_close, second, expected))):
        return "a trial gave other values"  # code that does more than its recording
    return in_place if is_same else replay


def _same_steps(replay: Replay, examples: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether two steps that overwrite states give the same bits: no loop reads them once more."""
    return all(map(_same_bits, _two_steps(replay, examples)[1], expected))


def _two_steps(replay: Replay, examples: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states and the sent values after one step, and after two."""
    signature = replay.tape.signature
    s, c, r = signature.states, signature.constants, signature.received
    sent = [torch.full_like(t, _poison(t.dtype), device="cpu") for t in replay.results[s:]]
    repetition = Repetition(
        replay,
        examples[:s],
        examples[s : s + c],
        examples[s + c + r :],
        [[tensor] * 2 for tensor in examples[s + c : s + c + r]],
        [[tensor] * 2 for tensor in sent],
        2,
    )
    made = []
    for steps in (1, 2):
        repetition.advance(steps, 1.0)
        made.append([tensor.clone() for tensor in (*repetition.values, *sent)])
    return made[0], made[1]


def _example(like: Tensor, number: int) -> Tensor:
    """Values that no operator should refuse: positive fractions, and 0 of other types."""
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    if not like.dtype.is_floating_point:
        return tensor.zero_()
    generator = torch.Generator("cpu").manual_seed(number)
    values = torch.rand(like.shape, generator=generator, device="cpu")
    return tensor.copy_(values * 0.1 + 0.01)


def _poison(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point else 1


def _close(made: Tensor, expected: Tensor) -> bool:
    """Whether they are equal up to the order of sums."""
    if not expected.dtype.is_floating_point:
        return torch.equal(made, expected)
    made, expected = made.double(), expected.double()  # narrow types have few operators
    scale = expected.abs().nan_to_num(0, 0, 0).max().item()
    return torch.allclose(made, expected, rtol=0, atol=_CLOSE * scale, equal_nan=True)


def _same_bits(made: Tensor, expected: Tensor) -> bool:
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (made, expected)))


def _addresses(tensors: Sequence[Tensor]) -> "array[int]":
    return array("q", [tensor.data_ptr() for tensor in tensors])


def _address(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]
