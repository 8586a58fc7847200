"""Say when tensors of the last call passed between host and IPUs, and how long that took.

All of it is measured on this computer's clock; cycles are the machine model's.
"""

from collections.abc import Callable, Iterable

from ipu_dynamo.runtime.execute.host_io.transfer_times import Latency, Transfers
from ipu_dynamo.runtime.execute.timed import Interval
from ipu_dynamo.whole_step.compiled_model import CompiledModel

Latencies = tuple[float, float, float]  # seconds: minimum, maximum, mean
_NAMES = ("input", "input_complete", "output", "output_complete")


class PerfCounters:
    """The part of an executor that answers for the times of its last complete call."""

    _core: CompiledModel | None

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """When each transfer of the last call began and ended, in seconds of a monotonic clock.

        Returns:
            for `input`, `input_complete`, `output` and `output_complete` a list for each tensor of
            the arguments or of the returned value; `[[]]` each before the model is compiled.
        """
        if self._core is None:
            return {name: [[]] for name in _NAMES}
        moved = self._core.transfers
        columns = *_times(moved.inputs), *_times(moved.outputs)
        return dict(zip(_NAMES, columns, strict=True))

    def getHostIpuLatency(self) -> Latencies:
        """Seconds, least, most and mean, from the first to the last input of each output."""
        return self._latency(lambda transfers: transfers.host_to_ipu)

    def getComputeLatency(self) -> Latencies:
        """Seconds, least, most and mean, from the last input of each output to the output."""
        return self._latency(lambda transfers: transfers.compute)

    def getIpuHostLatency(self) -> Latencies:
        """Seconds, least, most and mean, in which each output was brought to the host."""
        return self._latency(lambda transfers: transfers.ipu_to_host)

    def getLatency(self) -> Latencies:
        """Seconds, least, most and mean, from the first input of each output to the output."""
        return self._latency(lambda transfers: transfers.round_trip)

    def _latency(self, read: Callable[[Transfers], Latency]) -> Latencies:
        return (0.0, 0.0, 0.0) if self._core is None else read(self._core.transfers)


def _times(streams: Iterable[Iterable[Interval]]) -> tuple[list[list[float]], list[list[float]]]:
    """Where the transfers of each stream begin, and where they end."""
    spans = [list(stream) for stream in streams]
    return [[start for start, _ in s] for s in spans], [[end for _, end in s] for s in spans]
