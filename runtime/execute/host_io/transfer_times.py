"""Time the transfers between host and IPUs in a call, on the host's clock.

A micro-batch's inputs pass when its first task takes them, and its outputs when its last task has
left them to the host. Source: PopTorch user guide, "Obtaining profiling information", latencies.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from ipu_dynamo.program import Output, Program
from ipu_dynamo.runtime.execute.host_io.batching import Batching
from ipu_dynamo.runtime.execute.host_io.host_streams import HostStreams
from ipu_dynamo.runtime.execute.observer import Observer
from ipu_dynamo.runtime.execute.timed import Interval

_NEVER = (0.0, 0.0)


class Latency(NamedTuple):
    """Seconds over the groups of transfers of a call; all 0 where there are none."""

    minimum: float
    maximum: float
    mean: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """That of one group after the other."""
        if not seconds:
            return cls(0.0, 0.0, 0.0)
        mean = sum(seconds) / len(seconds)
        return cls(min(seconds), max(seconds), min(max(mean, min(seconds)), max(seconds)))


@dataclass
class CallTimes:
    """The spans of one call, by micro-batch in the order [D, A, R]."""

    received: list[Interval]
    sent: list[Interval]


class TransferTimes(Observer):
    """The spans of the last complete call; set it as an executable's `transfers` to record them.

    Two of its methods are methods of lists, so that an event is no Python call.
    """

    def __init__(self) -> None:
        self.last: CallTimes | None = None
        self._received: list[Interval] = []
        self._sent: list[Interval] = []
        self.received = self._received.__setitem__
        self.sent = self._sent.__setitem__  # of several IPUs the last one's time stays

    def call_began(self, micro_batches: int) -> None:
        self._received[:] = self._sent[:] = [_NEVER] * micro_batches

    def call_ended(self, streams: HostStreams, complete: bool) -> None:
        if complete:
            self.last = CallTimes([*self._received], [*self._sent])


@dataclass(frozen=True, slots=True)
class OutputTransfers:
    """The transfers that belong to one value of the outputs."""

    inputs: list[Interval] = field(default_factory=list)
    outputs: list[Interval] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Transfers:
    """The transfers of a call, and their latencies.

    Args:
        inputs, outputs: for each stream the spans of its transfers, in the order [D, A, R].
        groups: with the inputs of several micro-batches, where fewer outputs are returned.
    """

    inputs: tuple[tuple[Interval, ...], ...]
    outputs: tuple[tuple[Interval, ...], ...]
    groups: tuple[OutputTransfers, ...]

    @property
    def host_to_ipu(self) -> Latency:
        """From the first input of a group to the end of its last."""
        return Latency.of([_end(g.inputs) - _begin(g.inputs) for g in self.groups if g.inputs])

    @property
    def compute(self) -> Latency:
        """From the end of a group's last input to the beginning of its last output."""
        return Latency.of([_last(g.outputs) - _end(g.inputs) for g in self._whole()])

    @property
    def ipu_to_host(self) -> Latency:
        """From the first output of a group to the end of its last."""
        return Latency.of([_end(g.outputs) - _begin(g.outputs) for g in self.groups if g.outputs])

    @property
    def round_trip(self) -> Latency:
        """From the first input of a group to the end of its last output."""
        return Latency.of([_end(g.outputs) - _begin(g.inputs) for g in self._whole()])

    def _whole(self) -> list[OutputTransfers]:
        return [group for group in self.groups if group.inputs and group.outputs]


def transfers_of(
    program: Program, batching: Batching, times: CallTimes | None, returned: Collection[str]
) -> Transfers:
    """The transfers of a call.

    Args:
        batching: of the program.
        times: of a recorded call; None: no call was recorded.
        returned: names of the output streams that count.
    """
    outputs = [output for output in program.outputs if output.name in returned]
    inputs = [stream for stream in program.inputs if stream.source == "host"]
    if times is None:
        return Transfers(((),) * len(inputs), ((),) * len(outputs), ())
    sent = [_sent(output, batching, times) for output in outputs]
    received = {place: span for place, span in enumerate(times.received) if span != _NEVER}
    groups: dict[tuple[int, ...], OutputTransfers] = {}
    for place, span in received.items() if inputs else ():
        groups.setdefault(_group(place, outputs, batching), OutputTransfers()).inputs.append(span)
    for spans in sent:
        for place, span in spans.items():
            groups.setdefault(_group(place, outputs, batching), OutputTransfers()).outputs.append(
                span
            )
    return Transfers(
        (tuple(received.values()),) * len(inputs),
        tuple(tuple(spans.values()) for spans in sent),
        tuple(groups.values()),
    )


def _sent(output: Output, batching: Batching, times: CallTimes) -> dict[int, Interval]:
    """When the values of an output went to the host, by the micro-batches that they are of.

    An output with one value for all micro-batches is sent after the last of them has ended.
    """
    replicas, kept = batching.replicas, [k for row in batching.kept(output) for k in row]
    if output.returns == "once":
        return {0: times.sent[0]}
    if output.returns in ("final", "sum"):
        first = len(times.sent) - replicas
        return {first + r: max(times.sent[r::replicas]) for r in range(replicas)}
    return {place: span for place, span in enumerate(times.sent) if kept[place // replicas]}


def _group(place: int, outputs: Sequence[Output], batching: Batching) -> tuple[int, ...]:
    """The group of a micro-batch: those of one replica, as fine as the outputs are returned."""
    step, replica = divmod(place, batching.replicas)
    iteration, accumulated = divmod(step, batching.accumulation)
    if any(output.returns == "all" for output in outputs):
        return iteration, accumulated, replica
    if periods := [output.period for output in outputs if output.returns == "every"]:
        return iteration // min(periods), accumulated, replica
    return (replica,)


def _begin(spans: Sequence[Interval]) -> float:
    return min(begin for begin, _ in spans)


def _last(spans: Sequence[Interval]) -> float:
    return max(begin for begin, _ in spans)


def _end(spans: Sequence[Interval]) -> float:
    return max(end for _, end in spans)
