"""Run fused steps as recordings, which are repeated without Python between them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ipu_dynamo.profiling.private.profiler import ProfilerRow
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.runtime.engines.check.checked_stage import believed, plain
from ipu_dynamo.runtime.engines.replay.replay import Repetition, Replay, ReplayError, replay_of
from ipu_dynamo.runtime.engines.replay.tape import Signature
from ipu_dynamo.runtime.execute.fused_step import FusedFunction, FusedStep
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams, Print, SentStream
from ipu_dynamo.runtime.execute.observer import NOBODY, Observer
from ipu_dynamo.runtime.execute.timed import title_of

_REPEATED = "repeated without Python"  # so its parts are not timed
SECONDS = 0.02  # of repeated steps without Python: so long a signal's handler waits


class ReplayedStep(FusedStep):
    """Fused steps that repeat the recorded calls of their function, where a recording fits.

    Other steps call the function: where it cannot be recorded, or where inputs have other layouts.
    """

    def _make(self, hyperparameters: Hyperparameters) -> FusedFunction:
        """Compile the function for these hyperparameters, and record its calls."""
        function = super()._make(hyperparameters)
        function.replay = _recorded(function)
        return function

    def run(self, steps: int, streams: HostStreams, observer: Observer) -> None:
        """Repeat `steps` steps; call the function for those that cannot be repeated."""
        prepared, made = self.prepared, 0
        now = prepared.function
        replay = now.replay
        received = (streams.received[place][0] for place in now.places)
        first = [*now.stored_tensors, *now.constants, *received, *prepared.tensors]
        if isinstance(replay, Replay) and believed(now.stage) and replay.fits(first):
            while made < steps:  # again after variables were written within the call
                made = self._repeat(replay, range(made, steps), streams, observer)
        else:
            self._run(range(steps), streams, observer)

    def _repeat(
        self, replay: Replay, steps: range, streams: HostStreams, observer: Observer
    ) -> int:
        """Repeat the function's calls, without Python between the steps.

        Returns:
            The step to go on with, if variables were written before it, or the end.
        """
        prepared, commit = self.prepared, self.commit
        now, numbers = prepared.function, prepared.tensors
        stored_tensors, first, count = now.stored_tensors, steps.start, len(steps)
        received = [streams.received[place] for place in now.places]
        if first:
            received = [of_each[first:] for of_each in received]
        kept = [_kept(stream, steps) for stream in streams.sent]
        sent = list(map(_own_tensors, replay.results[len(stored_tensors) :], kept))
        steps_made = Repetition(
            replay, stored_tensors, now.constants, numbers, received, sent, count
        )
        commit.follow(stored_tensors, steps_made)
        observed, ends = observer is not NOBODY, steps_made.ends
        most = 1 if observed and observer.needs_single_steps else count
        row, of = None, now.stage_pass
        if observer.instruction_ended is not None:
            row = ProfilerRow(f"{title_of(of)}, {_REPEATED}")
            of = replace(of, function=f"{of.function}, {_REPEATED}")
        while (step := steps_made.steps) < count:
            if observer.update_began is not None:
                observer.update_began(first + step, commit.current)
            began = start = perf_counter()
            try:
                if row is not None:
                    row.__enter__()
                steps_made.advance(min(step + most, count), SECONDS)
            except ReplayError as error:
                values, failed = steps_made.values, first + steps_made.steps
                frame: list[Any] = [*values, *now.constants, *numbers, *now.blank]
                now.task(frame, failed, streams.received, streams.sent)  # it raises
                raise now.binding.failed(0, error, None, failed) from error
            finally:
                if row is not None:
                    row.__exit__(None, None, None)
                for stream, made, wanted in zip(streams.sent, sent, kept, strict=True):
                    leave = stream.__setitem__ if isinstance(stream, SentStream) else stream
                    for number in range(step, steps_made.steps):
                        if wanted[number]:
                            leave(first + number, made[number])
            if observed:
                for number in range(step, steps_made.steps):
                    end = began + ends[number]
                    self._report(observer, of, first + number, (start, end), streams)
                    start = end
            if self._storage.waiting:
                commit.settle()
                self._storage.write_waiting()
                return first + steps_made.steps
        return steps.stop

    def _repeats(self) -> Iterator[str]:
        replay = self.now.replay
        if isinstance(replay, Replay):
            tape = replay.tape
            overwritten = f"{len(replay.in_place)} of {tape.signature.states} states overwritten"
            calls = f"{tape.kernels} kernels and {tape.matmuls} matmuls a step"
            yield f"repeated without Python: {calls}, {overwritten}"
        else:
            yield f"called by Python: {replay}"


def _recorded(now: FusedFunction) -> Replay | str:
    """Record a step; return the reason if that is not possible."""
    fused = now.fused
    ((recipe, stage),) = now.binding.stages.values()
    placeholders = recipe.lowered.graph.graph.find_nodes(op="placeholder")
    signature = Signature(
        len(fused.state),
        len(fused.constants),
        len(fused.received),
        len(fused.hyperparameters),
        len(fused.sent),
    )
    arguments = [node.meta["val"] for node in placeholders]
    replay = replay_of(plain(stage), arguments, signature, recipe.overwrites)
    if isinstance(replay, Replay):
        now.check(replay.results[: len(now.stored_tensors)])
    return replay


def _kept(stream: SentStream | Print, steps: range) -> Sequence[bool]:
    """For each step, whether the call needs the value that it sends."""
    if isinstance(stream, SentStream):
        return stream.kept[steps.start : steps.stop]
    return [True] * len(steps)


def _own_tensors(like: Tensor, kept: Sequence[bool]) -> list[Tensor]:
    """A tensor for every step: those that are kept have memory of their own."""
    count, shape = sum(kept), like.shape
    if count > 1 and like.is_contiguous():
        own = iter(torch.empty((count, *shape), dtype=like.dtype, device="cpu").unbind(0))
    else:
        own = iter([_empty(like) for _ in range(count)])
    dropped = _empty(like) if count < len(kept) else None
    return [next(own) if keep else dropped for keep in kept]  # type: ignore[misc]


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
