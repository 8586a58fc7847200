"""Complete each step of a call on all ranks, or on none."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from zlib import crc32

from torch import Tensor

from ipu_dynamo.errors import IpuError, RankLost
from ipu_dynamo.ops.private.deferred_signals import DeferredSignals
from ipu_dynamo.program import Program, Update
from ipu_dynamo.program.fused import Hyperparameters
from ipu_dynamo.runtime.engines.check.checks import Checks
from ipu_dynamo.runtime.execute.step_end import StepEnd
from ipu_dynamo.runtime.execute.tasks.rank_streams import RankStreams, RowValue
from ipu_dynamo.runtime.execute.transaction.user_writes import (
    WeightsInCommon,
    bytes_of,
    digest_of,
)
from ipu_dynamo.runtime.ranks.agreement import gather_values
from ipu_dynamo.runtime.ranks.vote import CommonValue, StepFailure, vote

_UNKNOWN = "this rank was interrupted while it voted: whether the step is complete is not known"
_TWICE = "a rank was interrupted again while it waited for others, after its step had failed"

_NOT_KNOWN = [CommonValue("", 0, dict)] * 3  # the values of a call that fails before they are made

_CHECKS = "checks of compiled functions"

# The messages that a rank still has to send in its call: none, a step's, the rest, or its results.
_NOTHING, _STEP, _REST, _RESULTS = range(4)


class RankCall:
    """A call of a program on several ranks.

    A rank that fails at any point drains its step: it sends zeros in place of values, drops all
    messages to it, takes part in all exchanges, and votes. So no rank waits without end, and the
    next call finds no message.

    Args:
        streams: from and to other ranks.
        row: of the results that ranks of a row give each other, see `RankStreams`; None: a rank has
            its own.
        weights: those that ranks have in common.
        ends: the instructions before and after the micro-batches, for a step that fails before
            others are chosen.
        checks: of compiled functions, whose outcomes ranks have in common.

    Attributes:
        ends: those of the present step.
        place: of the operation that runs, as in `StepFailure`.
        calls: that this rank has begun.
    """

    def __init__(
        self,
        streams: RankStreams,
        row: Sequence[RowValue] | None,
        weights: "WeightsInCommon",
        ends: Sequence[StepEnd],
        checks: Checks | None = None,
    ) -> None:
        self._streams, self._row, self._weights, self.ends = streams, row, weights, ends
        self._checks = Checks("off") if checks is None else checks
        self.calls = 0
        self.place: tuple[int, ...] = ()
        self._owes = _NOTHING
        self._steps = 0  # that this call still has to vote on
        self._values: Sequence[CommonValue] = _NOT_KNOWN

    def operation(self) -> AbstractContextManager[None]:
        """Say that the ranks are in their next call."""
        self.calls += 1
        number = self._streams.number
        kind, text = f"call of program {number}", f"call {self.calls} of program {number}"
        return self._streams.transport.operation("mesh", kind, text)

    def open(self, steps: int) -> None:
        """Begin a call of so many steps."""
        self._steps, self._owes, self._values = steps, _STEP, _NOT_KNOWN
        self.place = (-1,)
        self._weights.note()

    def agree_on(
        self,
        inputs: Mapping[str, Tensor],
        state: tuple[int, int],
        hyperparameters: Hyperparameters,
        program: Program,
    ) -> None:
        """Compare the values of the call in each vote.

        Args:
            state: the seed and the number of the first step.
        """
        share = self._streams.transport.share
        in_row = share.columns > 1
        self._values = [
            _settings(self.calls, state, hyperparameters, program),
            _arguments(inputs, in_row=in_row),
            self._weights.value(share.rank),
        ]

    def close(self) -> None:
        """End a call: later writes of weights are the user's."""
        self._weights.keep()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read weights and states from the ranks of the row.

        Raises:
            RanksDiffer: a read would overwrite values that only one rank has written.
        """
        transport = self._streams.transport
        with transport.operation("row", "read", "a read of weights or states"):
            self._weights.check_row(transport)
            yield
            self._weights.keep()

    def begin(self, *ends: StepEnd) -> None:
        """Begin the messages of a step with these ends."""
        with DeferredSignals():  # one may not be begun in part
            self._owes, self.ends = _REST, ends
            for end in ends:
                end.begin()
            self._streams.begin([stream for end in ends for stream in end.streams])

    @contextmanager
    def deciding(self) -> Iterator[bool]:
        """Vote, and run a block that writes the step. Signals wait until its end.

        Yields:
            Whether the step is complete. If not, a compiled function was wrong on some rank. All
            ranks undo the step, and run it again with that function operator by operator.

        Raises:
            IpuError: see `vote`. A rank that is interrupted twice in its vote has lost the mesh.
        """
        with DeferredSignals(once=True):
            with self._streams.unbroken(_UNKNOWN):
                differ = {value.name for value in self._vote(None)}
                if _CHECKS in differ:
                    transport = self._streams.transport
                    of_ranks = gather_values(transport, "mesh", self._checks.reports)
                    self._checks.take({n: text for of in of_ranks for n, text in of.items()})
                    self._steps, self._owes = self._steps + 1, _STEP
            if differ - {_CHECKS}:  # a rank has written weights, and all have the same
                self._weights.agreed()
                self._values = [*self._values[:-1], replace(self._values[-1], value=0)]
            yield _CHECKS not in differ

    def agree_on_update(self, write: Callable[[], None]) -> None:
        """Write variables, and vote on that: an update that fails anywhere is undone everywhere."""
        failure: StepFailure | None = None
        try:
            write()
        except Exception as error:
            failure = StepFailure(error)
        vote(self._streams.transport, failure)

    def fail(self, error: BaseException) -> None:
        """End the call with an error of this rank.

        Raises:
            BaseException: see `vote`.
        """
        try:
            if self._owes == _RESULTS:
                self._owes = _NOTHING
                self._streams.drain_row(self._row or ())
            if self._owes == _NOTHING:
                return
            if self._owes == _STEP:
                self.begin(*self.ends)
            self._streams.drain()
            for end in self.ends:
                end.drain()
            self._vote(StepFailure(error, self.place))
        except RankLost as lost:
            if isinstance(error, Exception):
                raise
            raise error from lost  # an interrupt, which may have ended the other rank, too
        except BaseException as met:
            if met is not error and not isinstance(met, IpuError):
                self._streams.transport.abandon(_TWICE)
            raise

    def results(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the results of a complete call, those of the other ranks of the row with it."""
        if self._row is not None:
            own = self._streams.give_row(own, self._row)
        self._owes = _NOTHING
        return own

    def _vote(self, failure: StepFailure | None) -> list[CommonValue]:
        self._owes = _NOTHING  # if another rank failed
        number = 1 + self._streams.transport.share.rank if self._checks.reports else 0
        checks = CommonValue(_CHECKS, number, dict, may_differ=True)
        try:
            differ = vote(self._streams.transport, failure, [*self._values, checks])
        finally:
            self._streams.end()
        self._steps -= 1
        self._owes, self.place = _STEP if self._steps else _RESULTS, (-1,)
        return differ


def _settings(
    call: int, state: tuple[int, int], hyperparameters: Hyperparameters, program: Program
) -> CommonValue:
    """The random state and the hyperparameters of a call, which are the same on all ranks."""

    def parts() -> dict[str, str]:
        texts = {"numbers of calls": str(call), "random states (seed, step)": str(state)}
        updates = (i for i in program.walk() if isinstance(i, Update))
        names = {update.group: update.rule.hyperparameters for update in updates}
        for group, values in enumerate(hyperparameters):
            for name, value in zip(names.get(group, ()), values, strict=False):
                texts[f"{name} of parameter group {group}"] = repr(value)
        return texts | {"hyperparameters": repr([*map(tuple, hyperparameters)])}

    text = repr((call, state, [*map(tuple, hyperparameters)]))
    return CommonValue("settings of a call", digest_of(text.encode()), parts)


def _arguments(inputs: Mapping[str, Tensor], *, in_row: bool) -> CommonValue:
    """The arguments of a call, which are the same on all ranks of a row.

    Args:
        in_row: there are others in the row.
    """
    sums = {f"arguments {name}": crc32(bytes_of(t)) for name, t in inputs.items() if in_row}

    def parts() -> dict[str, str]:
        return {name: f"crc32 {number:08x}" for name, number in sums.items()}

    return CommonValue(
        "arguments",
        digest_of(repr(sums).encode()),
        parts,
        among="row",
        parts_among="row",
        hint="pass all ranks of a row of the mesh the same rows, in the same order",
    )
