"""Bring the tensors of a call to the IPUs, micro-batch by micro-batch, and the results back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch
from torch import Tensor

from ipu_dynamo.program import Input, Program, Receive
from ipu_dynamo.program.random_keys import random_keys
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.runtime.execute.host_io.batching import Batching, join


class SentStream(list[Tensor | None]):
    """The values that an output has sent, by micro-batch.

    Args:
        kept: by device iteration and accumulation step, whether the call needs the value.
    """

    __slots__ = ("kept",)

    def __init__(self, kept: Sequence[bool], micro_batches: int) -> None:
        super().__init__([None] * micro_batches)
        self.kept = kept


Print = Callable[[int, Tensor], None]  # a micro-batch, and its value


@dataclass(frozen=True, slots=True)
class HostStreams:
    """The inputs of a call, and the outputs that it has sent.

    Args:
        received: for each receive, the values of all micro-batches, in the order [D, A, R].
        sent: for each output stream, its values, or the function that prints them.
        results_device: the device of the results: that of the first input, or the first IPU's.
        seed: of the random streams.
        step: number of the call's first device iteration.
    """

    received: Sequence[Sequence[Tensor]]
    sent: Sequence[SentStream | Print]
    results_device: torch.device
    seed: int
    step: int


class HostLink:
    """The receives of a program's loop, and its outputs.

    Args:
        batching: how a caller's tensor splits into micro-batches.
        replicas: numbers of the replicas in the program.
        devices: of the IPUs.

    Attributes:
        drops: for each output, whether some calls need the values of some steps only.
        printing: how each output that prints does so.
    """

    def __init__(
        self,
        program: Program,
        batching: Batching,
        replicas: range,
        devices: Sequence[torch.device],
    ) -> None:
        self._receives = [i for i in sections(program).loop if isinstance(i, Receive)]
        self._streams = {stream.name: stream for stream in program.inputs}
        self._batching, self._replicas, self._devices = batching, replicas, devices
        self._outputs = program.outputs
        self.printing = [o.printing for o in program.outputs if o.printing is not None]
        self._returned = [[k for row in batching.kept(o) for k in row] for o in program.outputs]
        self.drops = [not all(flags) for flags in self._returned]
        self._one = replace(batching, iterations=1)
        self._alone = [  # output rules for a single iteration: `every` counts as `all`
            replace(o, returns="all") if o.returns == "every" else o for o in program.outputs
        ]

    def open(
        self,
        inputs: Mapping[str, Tensor],
        *,
        seed: int,
        step: int,
        printed: Callable[[int, int, Tensor], None] | None,
        every_iteration: bool = False,
    ) -> HostStreams:
        """The streams of a call.

        Args:
            inputs: the caller's tensors by stream.
            seed: of the random streams.
            step: number of the call's first device iteration.
            printed: gets the values of outputs that print, see `Observer`; None: no output does.
            every_iteration: keep the values of each iteration, for `of_iteration`.

        Raises:
            InputError: a tensor does not fit its stream.
        """
        received = self._received(inputs, seed, step)
        number, micro_batches = count(), self._batching.micro_batches
        sent: list[SentStream | Print] = []
        for output, returned in zip(self._outputs, self._returned, strict=True):
            if output.printing is not None:
                assert printed is not None
                sent.append(partial(printed, next(number)))
            else:
                kept = [True] * len(returned) if every_iteration else returned
                sent.append(SentStream(kept, micro_batches))
        first = next(iter(inputs.values()), None)
        results_device = self._devices[0] if first is None else first.device
        return HostStreams(received, sent, results_device, seed, step)

    def returned(self, streams: HostStreams) -> dict[str, Tensor]:
        """The joined tensor of every output stream that is returned, where the inputs are."""
        results_device, b = streams.results_device, self._batching
        return {
            output.name: join(output, [v for v in values if v is not None], b).to(results_device)
            for output, values in zip(self._outputs, streams.sent, strict=True)
            if isinstance(values, SentStream)
        }

    def of_iteration(self, streams: HostStreams, number: int) -> dict[str, Tensor]:
        """Return the results that a call of this device iteration alone would have.

        The iteration has sent all of its values. Those that the call does not return are dropped.
        The results share no memory with those of the call.
        """
        width, replicas = self._one.accumulation * self._one.replicas, self._one.replicas
        made = {}
        for output, values, returned in zip(self._alone, streams.sent, self._returned, strict=True):
            if not isinstance(values, SentStream):
                continue
            (needed,) = self._one.kept(output)
            own = values[number * width : (number + 1) * width]
            wanted = [v for i, v in enumerate(own) if needed[i // replicas] and v is not None]
            joined = join(output, wanted, self._one)
            made[output.name] = (joined.clone() if len(wanted) == 1 else joined).to(
                streams.results_device
            )
            for place in range(number * width, (number + 1) * width):
                if not returned[place // replicas]:
                    values[place] = None
        return made

    def _received(
        self, inputs: Mapping[str, Tensor], seed: int, step: int
    ) -> list[Sequence[Tensor]]:
        """Return for each receive its values, one for every micro-batch of a call."""
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
        """Return a stream's values for every micro-batch of a call, in the order [D, A, R]."""
        b = self._batching
        if stream.source != "host":
            return made_here(stream, b, self._replicas, device, seed, step)
        views = b.split(stream, inputs[stream.name], device)
        return views if b.groups == b.replicas else b.of_replicas(views)


def made_here(
    stream: Input, batching: Batching, replicas: range, device: torch.device, seed: int, step: int
) -> Sequence[Tensor]:
    """The values of a stream that no caller gives, for every micro-batch of a call: [D, A, R].

    Args:
        replicas: those that run here, as the program numbers them.
        seed, step: as `HostLink.open` takes them.
    """
    b = batching
    if stream.source == "random":
        return random_keys(
            seed=seed,
            step=step,
            iterations=b.iterations,
            accumulation=b.accumulation,
            replicas=replicas,
            device=device,
        )
    if stream.source == "replica":
        numbers = torch.arange(replicas.start, replicas.stop, device=device).unbind(0)
        return [n for _ in range(b.iterations * b.accumulation) for n in numbers]
    weights = torch.tensor([1.0 / (k + 1) for k in range(b.accumulation)], device=device)
    return [w for _ in range(b.iterations) for w in weights for _ in range(b.replicas)]
