"""Run the part of a step before its commit on all ranks: it succeeds on all, or on none."""

from collections.abc import Callable, Sequence

from ipu_dynamo.errors import RankLost
from ipu_dynamo.runtime.execute.step_end import StepEnd
from ipu_dynamo.runtime.execute.tasks.rank_streams import RankStreams
from ipu_dynamo.runtime.ranks.vote import StepFailure, vote


def run_together(ranks: RankStreams, ends: Sequence[StepEnd], compute: Callable[[], None]) -> None:
    """Compute what comes before a commit, and vote.

    A rank that fails drains: it sends zeros in place of what others wait for, drops what is sent to
    it, and takes part in all exchanges. So no rank waits for ever, and the next step finds no
    message.

    Args:
        ends: the instructions before and after the micro-batches.

    Raises:
        BaseException: see `vote`.
    """
    for end in ends:
        end.begin()
    ranks.begin([stream for end in ends for stream in end.streams])
    failure: StepFailure | None = None
    try:
        compute()
    except RankLost:
        raise
    except BaseException as error:
        micro_batch = getattr(error, "micro_batch", None)
        failure = StepFailure(error, () if micro_batch is None else (micro_batch,))
        ranks.drain()
        for end in ends:
            end.drain()
    try:
        vote(ranks.transport, failure)
    finally:
        ranks.end()
