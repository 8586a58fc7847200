"""Bring the tensors of a call to the IPUs: for each receive, what every micro-batch gets."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ipu_dynamo.program import Input, Program, Receive
from ipu_dynamo.program.random_keys import random_keys
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.execute.batching import Batching


class Receiving:
    """The receives of a program's loop.

    Args:
        batching: how a caller's tensor splits into micro-batches.
        devices: of the IPUs.

    Attributes:
        results: what the program calls that which each receive brings.
    """

    def __init__(
        self, program: Program, batching: Batching, devices: Sequence[torch.device]
    ) -> None:
        self._receives = [i for i in sections(program).loop if isinstance(i, Receive)]
        self._streams = {stream.name: stream for stream in program.inputs}
        self._batching, self._devices = batching, devices
        self.results = tuple(receive.result for receive in self._receives)

    def __call__(
        self, inputs: Mapping[str, Tensor], *, seed: int, step: int
    ) -> list[Sequence[Tensor]]:
        """For each receive, what it brings to every micro-batch of a call.

        Args:
            inputs: the caller's tensors by stream.
            seed: of the random streams.
            step: number of the call's first device iteration.
        """
        found: dict[tuple[str, torch.device], Sequence[Tensor]] = {}
        received = []
        for receive in self._receives:
            key = receive.stream, self._devices[receive.ipu]
            if key not in found:
                stream = self._streams[receive.stream]
                found[key] = self._chunks(stream, inputs, key[1], seed, step)
            received.append(found[key])
        return received

    def _chunks(
        self,
        stream: Input,
        inputs: Mapping[str, Tensor],
        device: torch.device,
        seed: int,
        step: int,
    ) -> Sequence[Tensor]:
        """What a stream brings to every micro-batch of a call, in the order [D, A, R]."""
        b = self._batching
        if stream.source == "random":
            return random_keys(
                seed=seed,
                step=step,
                iterations=b.iterations,
                accumulation=b.accumulation,
                replicas=b.replicas,
                device=device,
            )
        if stream.source == "accumulation":
            weights = torch.tensor([1.0 / (k + 1) for k in range(b.accumulation)], device=device)
            return [w for _ in range(b.iterations) for w in weights for _ in range(b.replicas)]
        views = b.split(stream, inputs[stream.name], device)
        if b.groups == b.replicas:
            return views
        steps = range(b.iterations * b.accumulation)
        return [views[step * b.groups + group] for step in steps for group in b.group_of]
